"""How much is asked for at once follows what a line carries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import MAX_CHUNK_BYTES
from worker.chunk_size import LEAST_BYTES, LEAST_IN_FLIGHT_BYTES, ChunkSize


def after(bytes_s: float, total: int = 64 << 20, size: ChunkSize | None = None) -> ChunkSize:
    """What is asked for once so many bytes have come over a line that carries so many a second."""
    size, came, now_s = size or ChunkSize(), 0, 100.0
    while came < total:
        came += size.nbytes
        now_s += size.nbytes / bytes_s
        size.came(size.nbytes, now_s)
    return size


@pytest.mark.parametrize(
    ("bytes_s", "nbytes", "chunks"),
    [
        (1.25e6, 256 << 10, 4),  # 10 Mbit/s
        (12.5e6, 256 << 10, 4),  # Wi-Fi
        (125e6, 256 << 10, 4),  # 1 Gbit/s
        (500e6, 1 << 20, 2),  # this machine
    ],
)
def test_the_line_decides(bytes_s: float, nbytes: int, chunks: int) -> None:
    size = after(bytes_s)
    assert (size.nbytes, size.chunks) == (nbytes, chunks)


def test_a_line_that_becomes_slow_is_asked_for_less() -> None:
    size = after(500e6)
    assert size.nbytes == MAX_CHUNK_BYTES
    assert after(12.5e6, size=size).nbytes == LEAST_BYTES


def test_a_line_between_fast_and_slow_keeps_what_it_has() -> None:
    assert after(150e6, size=after(500e6)).nbytes == MAX_CHUNK_BYTES
    assert after(150e6).nbytes == LEAST_BYTES


@given(st.lists(st.tuples(st.integers(1, MAX_CHUNK_BYTES), st.floats(0, 10)), max_size=60))
def test_whatever_comes_the_bounds_hold(came: list[tuple[int, float]]) -> None:
    size, now_s = ChunkSize(), 0.0
    for nbytes, step_s in came:
        now_s += step_s
        size.came(nbytes, now_s)
        assert LEAST_BYTES <= size.nbytes <= MAX_CHUNK_BYTES
        assert LEAST_IN_FLIGHT_BYTES <= size.nbytes * size.chunks <= 2 * MAX_CHUNK_BYTES
