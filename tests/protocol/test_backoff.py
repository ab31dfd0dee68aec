"""The wait between tries grows to a bound, and differs between workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.backoff import FIRST_S, MOST_S, delay_s


def test_it_doubles_up_to_a_bound() -> None:
    assert [delay_s(n, 1.0) for n in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert delay_s(40, 1.0) == MOST_S < 5  # with a handshake, a worker is back within 5 s of its backbone


@given(st.integers(1, 10**9), st.floats(0, 1), st.floats(0, 1))
def test_it_is_between_half_the_bound_and_the_bound(failures: int, one: float, other: float) -> None:
    waits = [delay_s(failures, draw) for draw in (one, other)]
    assert all(FIRST_S / 2 <= wait <= MOST_S for wait in waits)
    assert (waits[0] < waits[1]) == (one < other) or abs(one - other) < 1e-9
    assert delay_s(failures + 1, 0.0) >= delay_s(failures, 0.0)
