"""Servers that several tests ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_kit import Server, serving

LONG = ("-c", "100000")  # of context: an endless answer needs it


@pytest.fixture(scope="session")
def cache(compiled_kernels: Path) -> Path:
    """The cache folder in which the kernels are compiled."""
    return compiled_kernels.parents[1]


@pytest.fixture(scope="module", params=["0", "2"], ids=["alone", "two-workers"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Server]:
    """The demo model, with room for long answers."""
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, "--workers", request.param, *LONG, cache=cache) as server:
        yield server
