"""Which answers are audited: who is wrong is met within 160 calls with a chance of 99%, and nobody can foresee when."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from backbone.audit import EVERY, JUDGED, MOST_BYTES, MOST_OPEN, OWN_ROWS, Sampler, room

WITHIN, TRIES = 160, 1500


def sampler(seed: int = 1, every: int = EVERY, **options: int) -> Sampler:
    return Sampler(every, random.Random(seed), **options)


def met(calls: Iterator[tuple[str, list[int]]], liar: str, expert: int | None, seed: int) -> bool:
    """Whether one of the liar's first WITHIN calls is taken, each of which has the expert, and a row of it."""
    draws = sampler(seed)
    seen = 0
    for worker, experts in calls:
        is_his = worker == liar and (expert is None or expert in experts)
        seen += is_his
        if seen > WITHIN:
            return False
        if draws.takes(worker):
            draws.closed()
            rows = draws.rows(experts)
            if is_his and (expert is None or expert in [experts[row] for row in rows]):
                return True
    raise AssertionError("calls ended")


def some_calls(seed: int) -> Iterator[tuple[str, list[int]]]:
    """Calls of two workers, some of one row, some of many."""
    draw = random.Random(seed)
    while True:
        experts = draw.sample(range(16), 4)
        yield draw.choice("ab"), experts if draw.random() < 0.8 else sorted(experts * 20)


@pytest.mark.parametrize("expert", [None, 3])
def test_who_is_wrong_is_met_within_160_of_its_calls(expert: int | None) -> None:
    """All of a worker's rows, or those of one expert: 99% of the tries, whose seeds are fixed."""
    found = sum(met(some_calls(seed), "a", expert, seed) for seed in range(TRIES))
    assert 1 - (1 - 1 / EVERY) ** WITHIN > 0.99
    assert found >= 0.99 * TRIES


def test_two_that_lie_alike_are_met_within_588_of_their_calls() -> None:
    def found(seed: int) -> bool:
        """Whether one of the pair's calls is taken and looked at by the backbone, though the two agree."""
        draws = sampler(seed)
        for call in range(588):
            if draws.takes("ab"[call % 2]):
                draws.closed()
                if draws.is_judged():
                    return True
        return False

    assert 1 - (1 - 1 / EVERY / JUDGED) ** 588 > 0.99 > 1 - (1 - 1 / EVERY / JUDGED) ** 587
    # Of so many tries 99% find it, give or take what four standard deviations are.
    assert sum(found(seed) for seed in range(TRIES)) >= 0.98 * TRIES
    draws = sampler()
    assert 900 < sum(draws.is_judged() for _ in range(4000)) < 1100


def test_one_in_so_many_is_taken_and_with_none_no_one() -> None:
    draws = sampler(most_open=10**6)
    taken = sum(draws.takes("a") for _ in range(32_000))
    assert 850 < taken < 1150
    none = sampler(every=0)
    assert not any(none.takes("a") for _ in range(1000))
    every = sampler(every=1, most_open=10**6)
    assert all(every.takes("a") for _ in range(1000))


def test_no_two_seeds_draw_alike() -> None:
    drawn = [[draws.takes("a") for _ in range(400)] for draws in (sampler(1, most_open=999), sampler(2, most_open=999))]
    assert drawn[0] != drawn[1]
    assert drawn[0] == [draws.takes("a") for draws in [sampler(1, most_open=999)] for _ in range(400)]


def test_no_more_are_open_than_may_be_and_what_was_drawn_is_made_up_for() -> None:
    draws = sampler(every=1)
    assert [draws.takes("a") for _ in range(MOST_OPEN + 3)] == [True] * MOST_OPEN + [False] * 3
    assert not draws.takes("b")
    draws.closed()
    draws._every = 10**9  # nothing more is drawn
    assert not draws.takes("c")
    assert draws.takes("b")  # it was owed
    draws.closed()
    assert draws.takes("a")
    draws.closed()
    assert not draws.takes("a")


def test_few_rows_are_all_computed_again_and_of_many_so_many_and_one_of_each_expert() -> None:
    draws = sampler()
    assert draws.rows([3] * OWN_ROWS) == list(range(OWN_ROWS))
    assert draws.rows([3] * 50, 50) == list(range(50))
    experts = [0, 1, 2, 3] + [4] * 196
    times = [0] * len(experts)
    for _ in range(2000):
        chosen = draws.rows(experts)
        assert len(set(chosen)) == len(chosen) == OWN_ROWS
        assert chosen == sorted(chosen)
        assert {experts[row] for row in chosen} == {0, 1, 2, 3, 4}
        for row in chosen:
            times[row] += 1
    # A row of many is met as often as the share of them that is computed again: 12 of 196.
    assert times[:4] == [2000] * 4
    assert all(60 < each < 200 for each in times[4:])
    assert len(draws.rows(experts, 190)) == 190
    assert len(draws.rows(list(range(40)))) == 40  # one of each


def test_as_much_is_computed_again_as_fits() -> None:
    """Inputs count once, however many experts each is for."""
    words = MOST_BYTES // 4
    assert room(4, 1024, 1024) == words // 1024 - 4
    for inputs, width, out in ((1, 64, 64), (512, 2048, 2048), (10_000, 4096, 512), (300, 32, 64)):
        most = room(inputs, width, out)
        kept = [min(inputs, rows) * width + rows * out for rows in (most, most + 1)]
        assert kept[0] <= words < kept[1]


def test_one_checker_where_one_can_do_all_and_none_where_nobody_can() -> None:
    draws = sampler()
    assert draws.checkers({0: ["b", "c"], 1: ["c"]}) == {"c": [0, 1]}
    assert draws.checkers({0: ["b"], 1: ["c"], 2: []}) == {"b": [0], "c": [1]}
    assert draws.checkers({0: []}) == {}
    assert draws.checkers({}) == {}
    assert {name for _ in range(100) for name in draws.checkers({0: ["a", "b", "c"]})} == {"a", "b", "c"}
