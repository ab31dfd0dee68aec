"""Fixtures of the swarm's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from join_kit import Joiner, joiners


@pytest.fixture
def start() -> Iterator[Callable[..., Joiner]]:
    """Starts processes that join; they end with the test."""
    with joiners() as start:
        yield start
