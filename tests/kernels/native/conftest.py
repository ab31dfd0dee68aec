"""Builds of the kernels that several modules' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from native_builds import BUILDS, Build, Workshop


@pytest.fixture(scope="session")
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """Every build that a selected test is about: all are begun before the first one is waited for."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    params = [value for item in functions if hasattr(item, "callspec") for value in item.callspec.params.values()]
    wanted = {value.name for value in params if isinstance(value, Build)}
    made = Workshop(tmp_path_factory.mktemp("builds"), [b for b in BUILDS if b.name in wanted])
    yield made
    made.close()
