"""The float64 oracle: errors over rows, and that it says what the reference says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernels import exact, reference
from kernels.formats import GGMLType
from kernels.interface import ExpertWeights
from kernels.rope import RopeTable
from kernels.state import KeyValues, Rows, Sequence
from kernels.synthetic import expert, floats, stream

BITS = stream("exact")


def test_the_worst_row_counts() -> None:
    wanted = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    ours = np.array([[3.0, 4.5], [1.0, 0.0], [0.0, 0.25]], np.float32)
    found = exact.error_of(ours, wanted)
    assert (found.worst, found.median, found.largest) == (0.25, 0.1, 0.5)
    assert found.least_cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_infinitely_far(value: float) -> None:
    found = exact.error_of(np.array([[1.0, value], [1, 1]], np.float32), np.ones((2, 2)))
    assert (found.worst, found.largest, found.least_cosine) == (math.inf, math.inf, -1)
    assert found.median == math.inf  # of one row that is far and one that is not


def close(ours: Any, wanted: Any) -> None:
    assert wanted.dtype == np.float64
    assert exact.error_of(ours, wanted).worst < 2e-6


@pytest.mark.parametrize("word", sorted(reference.ACTIVATIONS))
@pytest.mark.parametrize("biases", [False, True])
def test_an_experts_rows(word: str, biases: bool) -> None:
    plain = expert(BITS, GGMLType.Q8_0, 64, 96, activation=word)
    of = {"gate_bias": 96, "up_bias": 96, "down_bias": 64} if biases else {}
    held = ExpertWeights(
        gate=plain.gate,
        up=plain.up,
        down=plain.down,
        activation=word,
        **{name: floats(BITS, width) for name, width in of.items()},
    )
    x = floats(BITS, 9, 64)
    close(reference.expert_rows(held, x), exact.expert_rows(held, x))


def test_operations_of_rows() -> None:
    x, weight = 3 * floats(BITS, 7, 40), floats(BITS, 40)
    close(reference.rms_norm(x, weight=weight, eps=0.1), exact.rms_norm(x, weight, 0.1))
    close(reference.softmax(x), exact.softmax(x))
    for name, function in exact.ELEMENTWISE.items():
        close(reference.OPERATIONS[name](x), function(x.astype(np.float64)))


@pytest.mark.parametrize("neighbours", [False, True])
def test_rope(neighbours: bool) -> None:
    x, table = floats(BITS, 5, 48), RopeTable(np.array([1.0, 0.1, 0.01]), 1.5)
    rows = Rows(np.zeros(5, np.int32), np.arange(5, dtype=np.int64), [], np.arange(5))
    turn = reference.rope_pairs if neighbours else reference.rope
    cos, sin = table.at(rows.positions)
    close(turn(x, rows=rows, heads=4, table=table), exact.rope(x, cos, sin, 4, neighbours=neighbours))


@pytest.mark.parametrize("option", [{}, {"window": 3}, {"softcap": 1.5}, {"sinks": floats(BITS, 4)}], ids=str)
def test_attention(option: dict[str, Any]) -> None:
    q, k, v = (floats(BITS, 12, width) for width in (4 * 8, 2 * 8, 2 * 6))
    sequence = Sequence((KeyValues(),))
    rows = Rows(np.zeros(12, np.int32), np.arange(12, dtype=np.int64), [sequence] * 12, np.arange(12))
    ours = reference.attention(q, k, v, rows=rows, memory=0, heads=4, kv_heads=2, **option)
    close(ours, exact.attention(q, k, v, heads=4, kv_heads=2, **option))
