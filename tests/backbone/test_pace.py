"""What is learnt of a worker's speed: robust, only as much as was seen, and never less than is true of other sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.pace import NEEDED, OUTLIER, STALE_ROWS, STALE_S, Pace


def answered(pace: Pace, taken_s: float, times: int = 1, experts: int = 4, rows: int = 4) -> None:
    for _ in range(times):
        pace.answered(experts, rows, taken_s, taken_s, taken_s)


def test_nothing_is_known_before_some_answers_beyond_the_first() -> None:
    pace = Pace()
    assert pace.most_s(4, 4) is pace.bound_s(4, 4) is None
    answered(pace, 0.1, NEEDED)
    assert pace.most_s(4, 4) is None
    answered(pace, 0.1)
    most_s = pace.most_s(4, 4)
    assert most_s is not None
    assert 0.1 <= most_s < 0.3


def test_the_first_answer_of_a_size_may_include_a_compile() -> None:
    plain, compiled = Pace(), Pace()
    answered(compiled, 30.0)
    answered(plain, 0.01)
    for pace in (plain, compiled):
        answered(pace, 0.01, 10)
    assert compiled == plain
    answered(compiled, 20.0, rows=400)
    assert compiled == plain or compiled.s_per_row == plain.s_per_row


def test_one_outlier_moves_it_by_a_factor_at_most_and_a_lasting_change_is_learnt() -> None:
    pace = Pace()
    answered(pace, 0.01, 50)
    calm_s = pace.most_s(4, 4) or 0.0
    answered(pace, 1000.0)
    assert calm_s < (pace.most_s(4, 4) or 0.0) < OUTLIER * calm_s
    answered(pace, 1.0, 60)
    assert (pace.most_s(4, 4) or 0.0) >= 1.0
    assert pace.s_per_row == pytest.approx(0.25, rel=0.1)


def test_one_slow_answer_at_first_does_not_settle_what_a_row_takes() -> None:
    pace = Pace()
    answered(pace, 0.1)
    answered(pace, 4.0)
    assert pace.s_per_row == 0.0  # not known: who seems slow is asked no more
    answered(pace, 0.4, NEEDED - 1)
    assert pace.s_per_row == pytest.approx(0.1)


def test_who_was_left_alone_while_others_worked_is_measured_anew() -> None:
    pace = Pace()
    answered(pace, 4.0, 1 + NEEDED)
    assert pace.row_s(STALE_ROWS * 1.0) == pytest.approx(1.0)
    assert pace.row_s(STALE_ROWS * 1.01) == 0.0
    pace.answered(4, 4, 9.0, 9.0, 9.0, STALE_ROWS * 1.01)
    answered(pace, 0.4, NEEDED - 1)
    assert pace.s_per_row == 0.0
    answered(pace, 0.4)
    assert pace.row_s(STALE_S) == pytest.approx(0.1)
    assert pace.row_s(STALE_ROWS * 0.1 + 1) == 0.0


def test_what_varies_has_more_time() -> None:
    steady, varying = Pace(), Pace()
    answered(steady, 0.02, 40)
    for i in range(40):
        answered(varying, 0.01 + 0.02 * (i % 2))
    assert (varying.most_s(4, 4) or 0.0) > 1.5 * (steady.most_s(4, 4) or 0.0)


@pytest.mark.parametrize(
    ("round_trip_s", "since_last_s", "compute_s", "taken_s"),
    [
        (0.5, 9.0, 0.3, 0.5),  # alone
        (0.9, 0.4, 0.3, 0.4),  # behind another call, whose answer came 0.4 s ago
        (0.9, 0.0, 0.3, 0.3),  # read together with the other's answer
        (0.5, 9.0, 7.0, 0.5),  # nobody computes longer than he was asked
    ],
)
def test_a_calls_own_time(round_trip_s: float, since_last_s: float, compute_s: float, taken_s: float) -> None:
    pace = Pace()
    for _ in range(1 + NEEDED):
        pace.answered(2, 2, round_trip_s, since_last_s, compute_s)
    (estimate,) = pace._sizes.values()
    assert estimate.mean_s == pytest.approx(taken_s)
    assert pace.s_per_row == pytest.approx(min(compute_s, round_trip_s) / 2)  # what the wire takes is no row's


@given(
    expert_s=st.floats(0.0, 1.0),
    row_s=st.floats(0.0, 1.0),
    call_s=st.floats(0.0, 1.0),
    seen=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=4),
    asked=st.tuples(st.integers(1, 64), st.integers(1, 64)),
)
def test_the_bound_holds_whatever_experts_rows_and_calls_cost(
    expert_s: float, row_s: float, call_s: float, seen: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    def seconds(experts: int, rows: int) -> float:
        return expert_s * experts + row_s * rows + call_s

    pace = Pace()
    for size in seen:
        for _ in range(NEEDED + 1):
            pace.answered(*size, seconds(*size), seconds(*size), 0.0)
    bound_s = pace.bound_s(*asked)
    # Sizes of the same powers of two share an estimate, which lags behind a larger one by no more than a factor of two.
    assert bound_s is not None
    assert 2 * bound_s >= seconds(*asked) * (1 - 1e-9)
