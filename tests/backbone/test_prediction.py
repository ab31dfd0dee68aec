"""Predictions against arithmetic: exact where chance has no say, against the exact expectation where it has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.clock import PARTS, Clock
from backbone.prediction import (
    BACKBONE,
    CALL_BYTES,
    PAIR_BYTES,
    PART_OF,
    Actual,
    LayerWork,
    NodeSpeed,
    Prediction,
    draw,
    predict,
)

OWN = NodeSpeed(name="backbone", bytes_per_s=1000.0)


def work(experts: int, chosen: int, usage: tuple[int, ...] | None = None) -> LayerWork:
    return LayerWork(expert_bytes=(100,) * experts, chosen=chosen, row_bytes=40, result_bytes=40, usage=usage)


def nodes(*speeds: float, latency_s: float = 0.0, wire: float = math.inf) -> list[NodeSpeed]:
    return [
        NodeSpeed(name=f"w{i}", bytes_per_s=speed, latency_s=latency_s, wire_bytes_per_s=wire)
        for i, speed in enumerate(speeds)
    ]


def one_layer(layer: LayerWork, held: Iterable[Iterable[int]], workers: list[NodeSpeed]) -> Prediction:
    holds = {node.name: {0: tuple(experts)} for node, experts in zip(workers, held, strict=True)}
    return predict({0: layer}, holds, workers, dense_bytes=0, backbone=OWN)


def latest(per_node: list[int], chosen: int) -> float:
    """The exact mean of the most of the chosen that meet on one node, when each expert is on one node."""
    total = math.comb(sum(per_node), chosen)
    return sum(
        max(counts) * math.prod(math.comb(n, c) for n, c in zip(per_node, counts, strict=True)) / total
        for counts in product(range(chosen + 1), repeat=len(per_node))
        if sum(counts) == chosen
    )


def test_without_workers_all_is_the_backbones() -> None:
    found = predict({0: work(8, 2), 3: work(4, 3)}, {}, [], dense_bytes=5000, backbone=OWN)
    assert (found.dense_s, found.wire_s) == (5.0, 0.0)
    assert found.straggler_s == pytest.approx((2 + 3) * 100 / 1000)
    assert found.token_s == pytest.approx(5.5)
    assert found.shares == {BACKBONE: 1.0}


def test_a_dense_model_takes_its_bytes() -> None:
    found = predict({}, {"w0": {}}, nodes(10.0), dense_bytes=2000, backbone=OWN)
    assert (found.token_s, found.wire_s, found.straggler_s) == (2.0, 0.0, 0.0)
    assert found.shares == {"w0": 0.0, BACKBONE: 0.0}


def test_one_worker_computes_all_that_is_chosen_and_costs_a_call_a_layer() -> None:
    (node,) = workers = nodes(200.0, latency_s=0.25, wire=1000.0)
    holds = {"w0": {layer: range(8) for layer in range(3)}}
    found = predict(dict.fromkeys(range(3), work(8, 2)), holds, workers, dense_bytes=0, backbone=OWN)
    assert found.straggler_s == pytest.approx(3 * 2 * 100 / 200)
    call = 0.25 + (40 + CALL_BYTES + 2 * (40 + PAIR_BYTES)) / node.wire_bytes_per_s
    assert found.wire_s == pytest.approx(3 * call)
    assert found.shares == {"w0": 1.0, BACKBONE: 0.0}


def test_what_all_hold_is_shared_evenly() -> None:
    found = one_layer(work(8, 4), [range(8), range(8)], nodes(100.0, 100.0))
    assert found.straggler_s == pytest.approx(2.0)
    assert found.shares == {"w0": 0.5, "w1": 0.5, BACKBONE: 0.0}
    odd = one_layer(work(8, 3), [range(8), range(8)], nodes(100.0, 100.0))
    assert odd.straggler_s == pytest.approx(2.0)


@pytest.mark.parametrize("per_node", [[64, 64], [43, 43, 42], [32, 32, 32, 32], [100, 28]])
def test_disjoint_parts_wait_for_whoever_got_most_by_chance(per_node: list[int]) -> None:
    starts = [sum(per_node[:i]) for i in range(len(per_node))]
    held = [range(start, start + n) for start, n in zip(starts, per_node, strict=True)]
    found = one_layer(work(128, 8), held, nodes(*[100.0] * len(per_node)))
    assert found.straggler_s == pytest.approx(latest(per_node, 8), rel=0.02)
    for node, n in enumerate(per_node):
        assert found.shares[f"w{node}"] == pytest.approx(n / 128, abs=0.01)


def test_a_slow_worker_is_waited_for() -> None:
    """Speeds 100 and 25: the slow one's rows count four times."""
    found = one_layer(work(16, 2), [range(8), range(8, 16)], nodes(100.0, 25.0))
    both, apart = 2 * math.comb(8, 2) / math.comb(16, 2), 64 / math.comb(16, 2)
    assert found.straggler_s == pytest.approx(both / 2 * 2 + both / 2 * 8 + apart * 4, rel=0.02)


def test_what_is_asked_for_most_counts_most() -> None:
    usage = (1_000_000, 1_000_000, 0, 0, 0, 0, 0, 0)
    hot = one_layer(work(8, 2, usage), [(0, 1), range(2, 8)], nodes(100.0, 100.0))
    assert hot.straggler_s == pytest.approx(2.0, rel=1e-3)
    assert hot.shares["w0"] > 0.999
    apart = one_layer(work(8, 2, usage), [(0, *range(2, 5)), (1, *range(5, 8))], nodes(100.0, 100.0))
    assert apart.straggler_s == pytest.approx(1.0, rel=1e-3)


def test_what_nobody_holds_is_computed_here_at_the_same_time() -> None:
    found = one_layer(work(2, 2), [(0,)], nodes(50.0, latency_s=1.0))
    assert found.shares == {"w0": 0.5, BACKBONE: 0.5}
    assert found.straggler_s == pytest.approx(100 / 50)
    assert found.wire_s == pytest.approx(1.0)


def test_the_wire_is_what_is_waited_beyond_computing() -> None:
    """A fast worker far away answers while a slow one near by still computes: nobody waits for its wire."""
    workers = [
        NodeSpeed(name="w0", bytes_per_s=1000.0, latency_s=0.5),
        NodeSpeed(name="w1", bytes_per_s=100.0, latency_s=0.001),
    ]
    found = one_layer(work(2, 2), [(0,), (1,)], workers)
    assert (found.straggler_s, found.wire_s) == (pytest.approx(1.0), pytest.approx(0.001))


def test_nobody_waits_for_whoever_is_not_asked() -> None:
    workers = [nodes(100.0, latency_s=0.25)[0], NodeSpeed(name="far", bytes_per_s=100.0, latency_s=9.0)]
    found = one_layer(work(4, 1), [range(4), range(4)], workers)  # of equals the first
    assert (found.shares["far"], found.wire_s) == (0.0, pytest.approx(0.25))


def test_sizes_of_experts_and_layers_count() -> None:
    mixed = LayerWork(expert_bytes=(100, 300), chosen=1, row_bytes=0, result_bytes=0)
    found = one_layer(mixed, [(0, 1)], nodes(100.0))
    assert found.straggler_s == pytest.approx(2.0, rel=0.05)


@given(st.integers(1, 40), st.integers(1, 10), st.none() | st.lists(st.integers(0, 99), min_size=40, max_size=40))
def test_draws_have_no_expert_twice_and_are_the_same_each_time(
    experts: int, chosen: int, usage: list[int] | None
) -> None:
    given_usage = None if usage is None else tuple(usage[:experts])
    ids = draw(experts, chosen, given_usage)
    assert ids.shape[1] == min(experts, chosen)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < experts
    assert (draw(experts, chosen, given_usage) == ids).all()


def test_the_clocks_parts_are_all_somewhere_and_sum_to_the_token() -> None:
    assert PART_OF.keys() == {*PARTS, "other"}
    clock = Clock()
    for nanoseconds, part in enumerate(PARTS, 1):
        clock.add(part, nanoseconds * 1_000_000)
    # dense 1, router 2, dispatch 3, wire 4, experts 5, combine 6, sampling 7; other: 40 - 28
    found = Actual.of(clock, 2, 0.040)
    assert found.dense_s == pytest.approx((1 + 2 + 6 + 7 + 12) / 2000)
    assert found.wire_s == pytest.approx((3 + 4) / 2000)
    assert found.straggler_s == pytest.approx(5 / 2000)
    assert found.token_s == pytest.approx(0.020)
