"""Placement: everything covered that can be, no budget exceeded, every layer shared out, the same plan each time."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from backbone.placement import Candidate, Plan, class_of_experts, place


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
        "8 of 16 experts (8.0 MB) do not fit the workers' memory, 8.0 MB in all, and are computed by the backbone; "
        "raise --worker-memory"
    )


def test_nobody_to_place_with_or_nothing_to_place() -> None:
    assert place({0: [5, 5]}, []).left_over == {0: (0, 1)}
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
