"""Placement: everything covered that can be, no budget exceeded, every layer shared out, nothing moved in vain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backbone.placement import (
    PRIOR_ROWS,
    STAYS_WITHIN,
    Candidate,
    Plan,
    class_of_experts,
    place,
    sensitive_layers,
)


def candidates(*budgets: int) -> list[Candidate]:
    return [Candidate(name=f"w{i}", memory_bytes=budget) for i, budget in enumerate(budgets)]


def used(plan: Plan, sizes: dict[int, list[int]]) -> dict[str, int]:
    return {name: sum(sizes[la][e] for la, es in layers.items() for e in es) for name, layers in plan.holds.items()}


def test_equal_workers_get_equal_parts_of_every_layer() -> None:
    plan = place({0: [10] * 8, 3: [10] * 8}, candidates(0, 0, 0))
    for layer in (0, 3):
        counts = [len(plan.holds[f"w{i}"][layer]) for i in range(3)]
        assert sorted(counts) == [2, 3, 3]
    assert sorted(len(layers[0]) + len(layers[3]) for layers in plan.holds.values()) == [5, 5, 6]
    assert plan.left_over == {}
    assert plan.describe() == ""


def test_a_small_worker_gets_a_small_part_of_every_layer() -> None:
    sizes = {layer: [10] * 8 for layer in range(4)}
    plan = place(sizes, candidates(80, 0))
    assert used(plan, sizes) == {"w0": 80, "w1": 240}
    assert {len(experts) for experts in plan.holds["w0"].values()} == {2}


def test_what_fits_nowhere_is_told_in_numbers_and_spread_over_the_layers() -> None:
    sizes = {layer: [1_000_000] * 4 for layer in range(4)}
    plan = place(sizes, candidates(4_000_000, 4_000_000))
    assert {layer: len(experts) for layer, experts in plan.left_over.items()} == {0: 2, 1: 2, 2: 2, 3: 2}
    assert plan.describe() == (
        "8 of 16 experts (8.0 MB) do not fit the memory of the workers, 8.0 MB in all: it takes 4.0 MB more for each "
        "of 2, or 8.0 MB more for one (raise --worker-memory, or a worker's own --memory); the backbone computes them"
    )
    alone = place(sizes, candidates(15_950_000))
    assert alone.describe() == (
        "1 of 16 experts (1.0 MB) do not fit the memory of the workers, 16.0 MB in all: it takes 1.0 MB more for one "
        "(raise --worker-memory, or a worker's own --memory); the backbone computes them"
    )


def test_nobody_to_place_with_or_nothing_to_place() -> None:
    nobody = place({0: [5, 5]}, [])
    assert nobody.left_over == {0: (0, 1)}
    assert nobody.describe() == "2 of 2 experts (0.1 MB): there is no worker to hold them; the backbone computes them"
    assert place({}, candidates(0)).holds == {"w0": {}}


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.integers(1, 50), min_size=1, max_size=9), max_size=4),
    st.lists(st.integers(0, 400), max_size=4),
)
def test_each_expert_once_and_no_budget_exceeded(sizes: dict[int, list[int]], budgets: list[int]) -> None:
    workers = candidates(*budgets)
    plan = place(sizes, workers)
    placed = [(la, e) for layers in plan.holds.values() for la, es in layers.items() for e in es]
    left = [(la, e) for la, es in plan.left_over.items() for e in es]
    assert sorted(placed + left) == sorted((la, e) for la, each in sizes.items() for e in range(len(each)))
    held = used(plan, sizes)
    for worker in workers:
        assert not worker.memory_bytes or held[worker.name] <= worker.memory_bytes
    # Coverage comes first: what is left over has no room anywhere.
    for la, e in left:
        assert all(w.memory_bytes and held[w.name] + sizes[la][e] > w.memory_bytes for w in workers)
    assert place(sizes, workers) == plan


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 5))
@example(5, 11, 3)  # what is owed from layer to layer would give one worker three and another one
@example(5, 21, 4)
def test_loads_of_a_layer_differ_by_one_at_most(workers: int, experts: int, layers: int) -> None:
    plan = place({layer: [7] * experts for layer in range(layers)}, candidates(*[0] * workers))
    for layer in range(layers):
        counts = [len(holds.get(layer, ())) for holds in plan.holds.values()]
        assert max(counts) - min(counts) <= 1
    totals = [sum(map(len, holds.values())) for holds in plan.holds.values()]
    assert max(totals) - min(totals) <= 1


def with_copies(*budgets: int) -> list[Candidate]:
    return [Candidate(name=f"w{i}", memory_bytes=budget, takes_copies=True) for i, budget in enumerate(budgets)]


def test_memory_that_is_left_takes_copies() -> None:
    sizes = {layer: [10] * 4 for layer in range(3)}
    whole = dict.fromkeys(range(3), (0, 1, 2, 3))
    assert place(sizes, with_copies(0, 0)).holds == {"w0": whole, "w1": whole}
    halves = place(sizes, with_copies(60, 60))
    assert used(halves, sizes) == {"w0": 60, "w1": 60}
    for layer in range(3):
        assert sorted(halves.holds["w0"][layer] + halves.holds["w1"][layer]) == [0, 1, 2, 3]
    # A small one beside one without a bound: what the small one holds is held twice.
    mixed = place(sizes, with_copies(30, 0))
    assert {len(experts) for experts in mixed.holds["w0"].values()} == {1}
    assert mixed.holds["w1"] == whole


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.integers(1, 50), min_size=1, max_size=9), max_size=4),
    st.lists(st.integers(0, 400), min_size=1, max_size=4),
)
def test_copies_are_no_second_ones_and_exceed_no_budget(sizes: dict[int, list[int]], budgets: list[int]) -> None:
    plan, once = place(sizes, with_copies(*budgets)), place(sizes, candidates(*budgets))
    held = used(plan, sizes)
    for worker in candidates(*budgets):
        assert not worker.memory_bytes or held[worker.name] <= worker.memory_bytes
        for layer, experts in once.holds[worker.name].items():
            assert set(experts) <= set(plan.holds[worker.name][layer])
    for layers in plan.holds.values():
        assert all(len(set(experts)) == len(experts) for experts in layers.values())
    assert plan.left_over == once.left_over


def of_classes(*workers: tuple[str, int]) -> list[Candidate]:
    """Workers by class and budget, which take copies."""
    return [
        Candidate(name=f"w{i}", memory_bytes=budget, takes_copies=True, numeric_class=kind)
        for i, (kind, budget) in enumerate(workers)
    ]


def test_copies_stay_within_the_class_of_the_first_holder() -> None:
    sizes = {layer: [10] * 6 for layer in range(2)}
    workers = of_classes(("x", 0), ("y", 0), ("x", 0))
    plan = place(sizes, workers)
    once = place(sizes, candidates(0, 0, 0))
    for layer in sizes:
        # Each has its third; the two of one class hold each other's too.
        assert plan.holds["w1"][layer] == once.holds["w1"][layer]
        both = tuple(sorted(once.holds["w0"][layer] + once.holds["w2"][layer]))
        assert plan.holds["w0"][layer] == plan.holds["w2"][layer] == both
    assert {key for key, kind in class_of_experts(plan.holds, workers).items() if kind == "y"} == {
        (layer, e) for layer in sizes for e in once.holds["w1"][layer]
    }


def test_what_several_hold_is_of_the_first_ones_class() -> None:
    workers = of_classes(("x", 0), ("y", 0))
    held = {"w1": {0: (0, 1)}, "w0": {0: (1, 2)}}
    assert class_of_experts(held, workers) == {(0, 0): "y", (0, 1): "x", (0, 2): "x"}


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.integers(1, 50), min_size=1, max_size=9), max_size=4),
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 400)), max_size=5),
)
def test_classes_change_copies_alone(sizes: dict[int, list[int]], classes: list[tuple[str, int]]) -> None:
    workers = of_classes(*classes)
    plan, once = place(sizes, workers), place(sizes, candidates(*(budget for _, budget in classes)))
    assert plan.left_over == once.left_over
    kinds = class_of_experts(once.holds, workers)
    held = used(plan, sizes)
    for worker in workers:
        mine = {(la, e) for la, es in plan.holds[worker.name].items() for e in es}
        first = {(la, e) for la, es in once.holds[worker.name].items() for e in es}
        alike = {key for key, kind in kinds.items() if kind == worker.numeric_class}
        assert first <= mine <= alike
        assert not worker.memory_bytes or held[worker.name] <= worker.memory_bytes
        assert worker.memory_bytes or mine == alike
    assert place(sizes, workers) == plan


# ---- speed, use, classes that are fixed, and what is held already

SIZES = st.dictionaries(st.integers(0, 9), st.lists(st.integers(1, 50), min_size=1, max_size=9), max_size=4)
EVEN = st.dictionaries(
    st.integers(0, 9), st.tuples(st.integers(1, 50), st.integers(1, 12)).map(lambda p: [p[0]] * p[1]), max_size=4
)
SPEEDS = st.sampled_from([None, 0.0, 0.5, 1.0, 1.5, 4.0, 10.0, math.nan, math.inf, -1.0])


@st.composite
def tasks(draw: st.DrawFn, sizes: st.SearchStrategy[dict[int, list[int]]] = SIZES) -> dict[str, Any]:
    """Everything that `place` takes."""
    found = draw(sizes)
    keys = [(layer, expert) for layer, each in found.items() for expert in range(len(each))]
    held = st.dictionaries(st.integers(0, 9), st.sets(st.integers(-1, 12)), max_size=4)
    workers = [
        Candidate(
            name=f"w{i}",
            memory_bytes=draw(st.sampled_from([0, 0, 30, 100, 400])),
            takes_copies=draw(st.booleans()),
            numeric_class=draw(st.sampled_from("xy")),
            speed=draw(SPEEDS),
            held=draw(held),
        )
        for i in range(draw(st.integers(0, 4)))
    ]
    usage = draw(st.none() | st.dictionaries(st.sampled_from(keys or [(0, 0)]), st.integers(0, 99)))
    fixed = draw(st.none() | st.dictionaries(st.sampled_from(keys or [(0, 0)]), st.sampled_from("xyz")))
    return {"expert_bytes": found, "candidates": workers, "usage": usage, "fixed": fixed}


@given(tasks())
def test_whatever_is_asked_budgets_and_classes_hold_and_what_fits_is_covered(task: dict[str, Any]) -> None:
    sizes, workers, fixed = task["expert_bytes"], task["candidates"], task["fixed"] or {}
    plan = place(**task)
    held, kinds = used(plan, sizes), class_of_experts(plan.holds, workers)
    for worker in workers:
        assert not worker.memory_bytes or held[worker.name] <= worker.memory_bytes
        mine = {(la, e) for la, es in plan.holds[worker.name].items() for e in es}
        assert all(kinds[key] == worker.numeric_class == fixed.get(key, worker.numeric_class) for key in mine)
        has = {(la, e) for la, es in worker.held.items() for e in es}
        assert plan.moves[worker.name] == sum(sizes[la][e] for la, e in mine - has)
    for la, e in kinds:  # who takes no copies holds what it was given first, and what it had
        came = [w for w in workers if e in plan.holds[w.name].get(la, ()) and e not in w.held.get(la, ())]
        assert sum(not w.takes_copies for w in came) <= 1
    left = {(la, e) for la, es in plan.left_over.items() for e in es}
    everything = {(la, e) for la, each in sizes.items() for e in range(len(each))}
    assert left | kinds.keys() == everything
    assert not left & kinds.keys()
    for la, e in left:
        able = [w for w in workers if w.numeric_class == fixed.get((la, e), w.numeric_class)]
        assert all(w.memory_bytes for w in able)
    assert sum(s.experts for s in plan.shortfalls) == len(left)
    assert sum(s.nbytes for s in plan.shortfalls) == sum(sizes[la][e] for la, e in left)


@given(tasks(EVEN))
def test_what_room_there_is_for_experts_of_one_size_is_used(task: dict[str, Any]) -> None:
    sizes = {la: [7] * len(each) for la, each in task["expert_bytes"].items()}
    plan = place(**task | {"expert_bytes": sizes, "fixed": None})
    count = sum(map(len, sizes.values()))
    room = sum(w.memory_bytes // 7 if w.memory_bytes else count for w in task["candidates"])
    assert sum(map(len, plan.left_over.values())) == max(0, count - room)


@given(tasks(), st.randoms(use_true_random=False))
def test_the_order_of_what_is_given_changes_nothing(task: dict[str, Any], random: Any) -> None:
    def shuffled(items: Mapping[Any, Any]) -> dict[Any, Any]:
        pairs = list(items.items())
        random.shuffle(pairs)
        return dict(pairs)

    plan = place(**task)
    workers = list(task["candidates"])
    random.shuffle(workers)
    again = {name: value if value is None else shuffled(value) for name, value in task.items() if name != "candidates"}
    assert place(candidates=workers, **again) == plan


@given(tasks(), st.booleans())
def test_what_would_make_it_fit_does(task: dict[str, Any], is_free: bool) -> None:
    workers, fixed = task["candidates"], task["fixed"] or {}
    whole = {(la, e): fixed.get((la, e), "x") for la, each in task["expert_bytes"].items() for e in range(len(each))}
    task = task | {"fixed": None if is_free else whole}
    for short in place(**task).shortfalls:
        if not short.workers:
            assert short.more_each_bytes == short.more_on_one_bytes == 0
            continue
        each = [
            replace(w, memory_bytes=w.memory_bytes + short.more_each_bytes) if w.name in short.workers else w
            for w in workers
        ]
        largest = max((w for w in workers if w.name in short.workers), key=lambda w: w.memory_bytes)
        one = [
            replace(w, memory_bytes=w.memory_bytes + short.more_on_one_bytes) if w is largest else w for w in workers
        ]
        for grown in (each, one):
            after = place(**task | {"candidates": grown}).shortfalls
            assert short.numeric_class not in {s.numeric_class for s in after}


def weights(sizes: Mapping[int, Sequence[int]], usage: Mapping[tuple[int, int], int] | None) -> dict[int, list[int]]:
    rows = {} if usage is None else usage
    prior = 1 if usage is None else PRIOR_ROWS
    return {la: [size * (prior + rows.get((la, e), 0)) for e, size in enumerate(each)] for la, each in sizes.items()}


def finish(plan: Plan, workers: Sequence[Candidate], weight: Sequence[int], layer: int) -> float:
    """When the slowest worker has read what it is given of a layer, each expert once."""
    return max(sum(weight[e] for e in plan.holds[w.name].get(layer, ())) / float(w.speed or 1) for w in workers)


@st.composite
def balanced(draw: st.DrawFn) -> tuple[dict[int, list[int]], list[Candidate], dict[tuple[int, int], int] | None]:
    """Workers of known speed, without bounds and copies."""
    sizes = draw(SIZES)
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0, 8.0]), min_size=1, max_size=4))
    workers = [Candidate(name=f"w{i}", memory_bytes=0, speed=speed) for i, speed in enumerate(speeds)]
    keys = [(la, e) for la, each in sizes.items() for e in range(len(each))]
    return sizes, workers, draw(st.none() | st.dictionaries(st.sampled_from(keys or [(0, 0)]), st.integers(0, 99)))


@given(balanced())
def test_the_slowest_ends_with_the_rest(task: Any) -> None:
    sizes, workers, usage = task
    plan = place(sizes, workers, usage=usage)
    speed = sum(w.speed for w in workers)
    for layer, each in weights(sizes, usage).items():
        # List scheduling: the last expert went to whoever ended first with it, so that none could end sooner.
        bound = (sum(each) + (len(workers) - 1) * max(each)) / speed
        assert finish(plan, workers, each, layer) <= bound * (1 + 1e-9)


def test_speed_decides_the_shares_and_one_that_is_not_known_is_the_usual() -> None:
    sizes = {layer: [10] * 12 for layer in range(3)}

    def shares(*speeds: float | None) -> list[int]:
        workers = [Candidate(name=f"w{i}", memory_bytes=0, speed=s) for i, s in enumerate(speeds)]
        return list(used(place(sizes, workers), sizes).values())

    assert shares(1.0, 2.0, 3.0) == [60, 120, 180]
    assert shares(1e9, 2e9, 3e9) == [60, 120, 180]
    assert shares(1.0, None, 3.0) == [60, 120, 180]
    assert shares(None, 0.0, None) == [120, 120, 120]


def test_what_is_asked_for_most_weighs_most() -> None:
    usage = {(0, 0): 99, (0, 1): 49, (0, 2): 49}
    plan = place({0: [10] * 6}, candidates(0, 0), usage=usage)
    assert sorted(plan.holds[name][0] for name in ("w0", "w1")) == [(0, 3), (1, 2, 4, 5)] or sorted(
        plan.holds[name][0] for name in ("w0", "w1")
    ) == [(0, 3, 5), (1, 2, 4)]
    assert used(place({0: [10] * 6}, candidates(0, 0)), {0: [10] * 6}) == {"w0": 30, "w1": 30}


def test_a_small_fast_worker_gets_the_hot_experts() -> None:
    usage = {(layer, expert): 100 for layer in range(2) for expert in (5, 6)}
    workers = [
        Candidate(name="gpu", memory_bytes=40, speed=20.0),
        Candidate(name="cpu", memory_bytes=0, speed=1.0),
    ]
    plan = place({0: [10] * 8, 1: [10] * 8}, workers, usage=usage)
    assert plan.holds["gpu"] == {0: (5, 6), 1: (5, 6)}


def having(plan: Plan, workers: Sequence[Candidate]) -> list[Candidate]:
    """The workers, once they have what a plan gives them."""
    return [replace(w, held=plan.holds.get(w.name, {})) for w in workers]


@given(tasks())
def test_a_plan_that_is_carried_out_stays_as_it_is(task: dict[str, Any]) -> None:
    workers = [replace(w, held={}, takes_copies=False) for w in task["candidates"]]
    plan = place(**task | {"candidates": workers})
    again = place(**task | {"candidates": having(plan, workers)})
    assert (again.holds, again.left_over, set(again.moves.values()) - {0}) == (plan.holds, plan.left_over, set())


@given(tasks(EVEN))
def test_one_with_copies_settles_soon(task: dict[str, Any]) -> None:
    # Where memory is short, who was first and whose is the copy may change: then a copy makes room for another expert.
    workers = [replace(w, held={}) for w in task["candidates"]]
    plans = [place(**task | {"candidates": workers, "usage": None})]
    while len(plans) < 2 or plans[-1].holds != plans[-2].holds:
        assert len(plans) < 6
        plans.append(place(**task | {"candidates": having(plans[-1], workers), "usage": None}))
    assert set(plans[-1].moves.values()) <= {0}
    assert len(plans) == 2 or any(w.takes_copies and w.memory_bytes for w in workers)
    for before, after in pairwise(plans):
        assert sum(map(len, after.left_over.values())) <= sum(map(len, before.left_over.values()))


@pytest.mark.parametrize(
    ("sizes", "workers"),
    [
        ({0: [1], 1: [5, 5], 2: [20], 3: [31, 31]}, {"w0": (0, False, None), "w1": (30, True, None)}),
        ({0: [4] * 9}, {"w0": (0, True, None), "w1": (30, True, 0.5), "w2": (0, True, 1.0)}),
        (
            {0: [17] * 10, 1: [50] * 10},
            {"w0": (0, False, None), "w1": (0, True, None), "w2": (0, False, None), "w3": (400, True, None)},
        ),
    ],
)
def test_copies_do_not_take_turns(
    sizes: dict[int, list[int]], workers: dict[str, tuple[int, bool, float | None]]
) -> None:
    asked = [
        Candidate(name=name, memory_bytes=memory, takes_copies=copies, speed=speed)
        for name, (memory, copies, speed) in workers.items()
    ]
    plan = place(sizes, asked)
    again = place(sizes, having(plan, asked))
    assert (again.holds, set(again.moves.values())) == (plan.holds, {0})


SOME = st.lists(st.sampled_from([0.5, 1.0, 3.0, 8.0]), min_size=2, max_size=5)


@given(EVEN, SOME, st.integers(0, 4))
def test_of_one_that_leaves_only_its_experts_are_given_anew(
    sizes: dict[int, list[int]], speeds: list[float], who: int
) -> None:
    workers = [Candidate(name=f"w{i}", memory_bytes=0, speed=speed) for i, speed in enumerate(speeds)]
    plan = place(sizes, workers)
    gone = workers[who % len(workers)]
    rest = having(plan, [w for w in workers if w is not gone])
    after = place(sizes, rest)
    for worker in rest:
        for layer, experts in plan.holds[worker.name].items():
            assert set(experts) <= set(after.holds[worker.name][layer])
    assert sum(after.moves.values()) == used(plan, sizes)[gone.name]


@given(EVEN, SOME)
def test_one_that_joins_takes_its_part_and_the_others_get_nothing(
    sizes: dict[int, list[int]], speeds: list[float]
) -> None:
    workers = [Candidate(name=f"w{i}", memory_bytes=0, speed=speed) for i, speed in enumerate(speeds)]
    plan = place(sizes, workers[:-1])
    after = place(sizes, [*having(plan, workers[:-1]), workers[-1]])
    assert {name for name, moved in after.moves.items() if moved} <= {workers[-1].name}
    alone = used(place(sizes, workers), sizes)[workers[-1].name]
    assert after.moves[workers[-1].name] <= alone
    # What the others have they keep: there is room, and it may be asked of either.
    for worker in workers[:-1]:
        assert after.holds[worker.name] == plan.holds[worker.name]


def test_what_one_that_joins_takes_is_its_share() -> None:
    sizes = {layer: [10] * 12 for layer in range(3)}
    workers = candidates(0, 0, 0)
    plan = place(sizes, workers[:2])
    assert place(sizes, [*having(plan, workers[:2]), workers[2]]).moves == {"w0": 0, "w1": 0, "w2": 120}


def test_held_experts_are_taken_from_a_worker_that_is_too_slow_for_them() -> None:
    sizes = {layer: [10] * 8 for layer in range(2)}
    slow = Candidate(name="slow", memory_bytes=0, speed=0.01, held={0: (0, 1), 1: (0,)})
    fast = Candidate(name="fast", memory_bytes=0, speed=1.0)
    assert used(place(sizes, [slow, fast]), sizes)["fast"] == 160
    equal = place(sizes, [replace(slow, speed=1.0), fast])
    assert {0, 1} <= set(equal.holds["slow"][0])
    assert used(equal, sizes) == {"slow": 80, "fast": 80}


def test_an_expert_goes_to_its_other_holder_where_that_saves_a_transfer() -> None:
    # First come would give 0 to the first and 1 to the second, and leave 2 for the third, which does not have it.
    held = {"a": {0: (0, 2)}, "b": {0: (0, 1, 2)}, "c": {0: (1,)}}
    workers = [Candidate(name=name, memory_bytes=10, held=has) for name, has in held.items()]
    plan = place({0: [10] * 3}, workers)
    assert set(plan.moves.values()) == {0}
    assert plan.left_over == {}


def test_with_less_memory_than_before_each_layer_keeps_its_part() -> None:
    sizes = {layer: [10] * 4 for layer in range(4)}
    held = {layer: range(4) for layer in sizes}
    plan = place(sizes, [Candidate(name="a", memory_bytes=80, held=held)])
    assert {layer: len(experts) for layer, experts in plan.holds["a"].items()} == dict.fromkeys(sizes, 2)
    assert plan.moves == {"a": 0}
    # Beside a slow one, that each layer waits for anyway, it could take the first layers whole.
    both = place(
        sizes,
        [Candidate(name="a", memory_bytes=80, speed=1.0, held=held), Candidate(name="b", memory_bytes=0, speed=0.1)],
    )
    assert {layer: len(experts) for layer, experts in both.holds["a"].items()} == dict.fromkeys(sizes, 2)


def test_what_a_worker_has_it_keeps_though_it_takes_no_copies() -> None:
    sizes = {layer: [10] * 4 for layer in range(2)}
    whole = dict.fromkeys(sizes, (0, 1, 2, 3))
    workers = [
        Candidate(name="a", memory_bytes=0, numeric_class="x", held=whole),
        Candidate(name="b", memory_bytes=60, numeric_class="x", held=whole),
        Candidate(name="c", memory_bytes=0, numeric_class="y", held=whole),
    ]
    fixed = {(layer, e): "x" if e < 3 else "y" for layer in sizes for e in range(4)}
    plan = place(sizes, workers, fixed=fixed)
    assert plan.holds == {
        "a": dict.fromkeys(sizes, (0, 1, 2)),
        "b": dict.fromkeys(sizes, (0, 1, 2)),
        "c": dict.fromkeys(sizes, (3,)),
    }
    less = place(sizes, [workers[0], replace(workers[1], memory_bytes=40), workers[2]], fixed=fixed)
    assert {len(experts) for experts in less.holds["b"].values()} == {2}


@pytest.mark.parametrize("room", [1, 2, 3])
def test_copies_are_of_what_is_asked_for_most_alike_in_all_layers(room: int) -> None:
    sizes = {layer: [10] * 4 for layer in range(2)}
    heat = {0: (5, 90, 20, 70), 1: (60, 3, 80, 9)}
    usage = {(layer, e): rows for layer, each in heat.items() for e, rows in enumerate(each)}
    everything = Candidate(name="a", memory_bytes=0, speed=1000.0)
    copies = Candidate(name="b", memory_bytes=20 * room, speed=0.001, takes_copies=True)
    plan = place(sizes, [everything, copies], usage=usage)
    assert used(plan, sizes) == {"a": 80, "b": 20 * room}
    for layer, each in heat.items():
        hottest = sorted(range(4), key=lambda e: -each[e])[:room]
        assert plan.holds["b"][layer] == tuple(sorted(hottest))


def test_copies_go_to_what_fewer_hold_when_nothing_is_known_of_use() -> None:
    sizes = {0: [10] * 6}
    whole = Candidate(name="a", memory_bytes=0, speed=1e6)
    plan = place(sizes, [whole, *(Candidate(name=n, memory_bytes=20, speed=1.0, takes_copies=True) for n in "bcd")])
    assert sorted(e for name in "bcd" for e in plan.holds[name][0]) == [0, 1, 2, 3, 4, 5]


def test_while_answers_run_an_experts_class_is_not_changed() -> None:
    sizes = {0: [1_000_000] * 6}
    fixed = {(0, e): "x" if e < 4 else "y" for e in range(6)}
    workers = [Candidate(name=f"w{i}", memory_bytes=0, numeric_class=kind) for i, kind in enumerate("xx")]
    plan = place(sizes, workers, fixed=fixed)
    assert plan.left_over == {0: (4, 5)}
    assert plan.describe() == (
        "2 of 2 experts (2.0 MB): there is no worker of class y to hold them; the backbone computes them"
    )
    small = Candidate(name="w2", memory_bytes=1_000_000, numeric_class="y")
    assert place(sizes, [*workers, small], fixed=fixed).describe() == (
        "1 of 2 experts (1.0 MB) do not fit the memory of the workers of class y, 1.0 MB in all: it takes 1.0 MB more for "
        "one (raise --worker-memory, or a worker's own --memory); the backbone computes them"
    )
    assert place(sizes, [*workers, small]).left_over == {}


@given(balanced(), st.data())
def test_what_stays_costs_a_layer_little(task: Any, data: st.DataObject) -> None:
    sizes, workers, usage = task
    whose = st.integers(0, len(workers))
    owner = {(la, e): data.draw(whose) for la, each in sizes.items() for e in range(len(each))}
    having_some = [
        replace(w, held={la: {e for e in range(len(each)) if owner[la, e] == i} for la, each in sizes.items()})
        for i, w in enumerate(workers)
    ]
    plan = place(sizes, having_some, usage=usage)
    speed = sum(w.speed for w in workers)
    for layer, each in weights(sizes, usage).items():
        holders = [[w for w in having_some if e in plan.holds[w.name].get(layer, ())] for e in range(len(each))]
        # Where two hold an expert, it was given to the one that did not have it; the other keeps it beside.
        first = [min(those, key=lambda w: e in w.held[layer]) for e, those in enumerate(holders)]
        bound = STAYS_WITHIN * (sum(each) + (len(workers) - 1) * max(each)) / speed
        for worker in having_some:
            load = sum(each[e] for e, who in enumerate(first) if who is worker)
            assert load / float(worker.speed or 1) <= bound * (1 + 1e-9)


def test_more_for_each_is_counted_in_whole_experts() -> None:
    (short,) = place({0: [10] * 3}, candidates(1, 1)).shortfalls
    assert (short.experts, short.more_each_bytes, short.more_on_one_bytes) == (3, 20, 30)


# ---- who is exact


def exactness(**kinds: str) -> list[Candidate]:
    """Workers by name: exact, rough, or off: out of what its class promises."""
    return [
        Candidate(name=name, memory_bytes=0, numeric_class=kind, is_f32=kind == "exact", is_off=kind == "off")
        for name, kind in kinds.items()
    ]


def layers_of(plan: Plan, name: str) -> set[int]:
    return {layer for layer, experts in plan.holds[name].items() if experts}


def test_the_last_quarter_of_the_layers_is_sensitive_and_at_least_one() -> None:
    assert sensitive_layers(range(8)) == {6, 7}
    assert sensitive_layers([1, 5, 9]) == {9}
    assert sensitive_layers([3]) == {3}
    assert sensitive_layers(range(48)) == set(range(36, 48))


def test_exact_workers_come_first_for_the_sensitive_layers() -> None:
    sizes = {layer: [10] * 8 for layer in range(8)}
    plan = place(sizes, exactness(a="rough", b="exact", c="exact"))
    assert layers_of(plan, "a") == set(range(6))
    for layer in range(6):
        assert sorted(len(plan.holds[name][layer]) for name in "abc") == [2, 3, 3]
    for layer in (6, 7):
        assert [len(plan.holds[name].get(layer, ())) for name in "abc"] == [0, 4, 4]
    assert plan.left_over == {}


def test_rough_workers_get_of_the_sensitive_layers_what_exact_ones_have_no_room_for() -> None:
    sizes = {layer: [10] * 8 for layer in range(4)}
    rough, exact = exactness(a="rough", b="exact")
    plan = place(sizes, [rough, replace(exact, memory_bytes=160)])
    assert len(plan.holds["b"][3]) == 4
    assert len(plan.holds["a"][3]) == 4
    assert plan.left_over == {}
    assert place(sizes, exactness(a="rough", b="rough")).left_over == {}


def test_who_is_off_gets_nothing_of_the_sensitive_layers_and_is_used_elsewhere() -> None:
    sizes = {layer: [1_000_000] * 8 for layer in range(8)}
    plan = place(sizes, exactness(a="off", b="exact"))
    assert layers_of(plan, "a") == set(range(6))
    assert layers_of(plan, "b") == set(range(8))
    alone = place(sizes, exactness(a="off"))
    assert layers_of(alone, "a") == set(range(6))
    assert set(alone.left_over) == {6, 7}
    assert alone.describe() == (
        "16 of 64 experts (16.0 MB): there is no worker to hold them; the backbone computes them"
    )


def test_who_comes_to_be_off_lets_go_of_what_is_sensitive() -> None:
    sizes = {layer: [10] * 4 for layer in range(4)}
    before = place(sizes, exactness(a="exact", b="exact"))
    off, exact = exactness(a="off", b="exact")
    held = [replace(c, held=before.holds[c.name]) for c in (off, exact)]
    after = place(sizes, held)
    assert layers_of(after, "a") == {0, 1, 2}
    assert after.holds["b"][3] == (0, 1, 2, 3)
    assert {layer: after.holds["a"][layer] for layer in range(3)} == {la: before.holds["a"][la] for la in range(3)}
    copies = [replace(c, takes_copies=True) for c in exactness(a="off", b="off", c="exact")]
    assert 3 not in layers_of(place(sizes, copies), "a") | layers_of(place(sizes, copies), "b")


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from(["exact", "rough", "off"]), st.integers(0, 400)), min_size=1, max_size=4),
    st.booleans(),
)
def test_exactness_costs_no_coverage(sizes: dict[int, list[int]], workers: list[tuple[str, int]], copies: bool) -> None:
    plain = [
        replace(*exactness(**{f"w{i}": kind}), memory_bytes=budget, takes_copies=copies)  # type: ignore[misc]
        for i, (kind, budget) in enumerate(workers)
    ]
    plan = place(sizes, plain)
    held, sensitive = used(plan, sizes), sensitive_layers(sizes)
    for worker in plain:
        assert not worker.memory_bytes or held[worker.name] <= worker.memory_bytes
        assert not (worker.is_off and layers_of(plan, worker.name) & sensitive)
    for la, left in plan.left_over.items():  # it has room nowhere where it may be
        able = [w for w in plain if not (w.is_off and la in sensitive)]
        for expert in left:
            assert all(w.memory_bytes and held[w.name] + sizes[la][expert] > w.memory_bytes for w in able)


def test_what_is_shared_between_exact_and_rough_workers_stays_where_it_is() -> None:
    sizes = {layer: [10] * 8 for layer in range(8)}
    rough, second, exact = exactness(a="rough", b="rough", c="exact")
    workers = [rough, second, replace(exact, memory_bytes=200)]
    plan = place(sizes, workers)
    assert layers_of(plan, "a") & sensitive_layers(sizes)  # the exact one has no room for all of these
    again = place(sizes, [replace(w, held=plan.holds[w.name]) for w in workers])
    assert again.holds == plan.holds
    assert set(again.moves.values()) == {0}
