"""Ranks: bars, promises, and what rows of a probe and their errors are."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
from swarm_kit import TinyExperts, some_rows

from backbone.oracle import Oracle, class_text, differing, distance, expert_of, kind_of, same_bits
from backbone.probing import MOST_EXPERTS, ROWS, probe_pairs, probe_rows
from backbone.ranks import Rank, promised, rank_of
from kernels import exact
from kernels.interface import NumericClass


@pytest.mark.parametrize(
    ("worst", "rank"),
    [(0.0, "f32"), (1e-5, "f32"), (1.1e-5, "i16"), (1e-4, "i16"), (1.1e-4, "f16"), (2e-3, "f16"), (2.1e-3, "unfit")],
)
def test_the_rank_of_a_worst_row(worst: float, rank: str) -> None:
    assert rank_of(worst) == rank
    assert rank_of(worst, is_same_bits=True) == ("exact" if rank == "f32" else rank)
    assert rank_of(worst).bar >= worst


def test_what_is_not_finite_is_unfit() -> None:
    assert rank_of(math.inf) == rank_of(math.nan) == Rank.UNFIT
    assert Rank.UNFIT.bar == math.inf


def test_what_a_class_promises() -> None:
    assert promised("f32", "f32") is Rank.F32
    assert promised("i16", "f32") is Rank.I16
    assert promised("f32", "f16") is promised("i16", "f16") is Rank.F16
    assert Rank.EXACT.keeps(Rank.F32)
    assert Rank.I16.keeps(Rank.I16)
    assert not Rank.F16.keeps(Rank.I16)
    assert [rank.tolerance for rank in (Rank.F32, Rank.I16, Rank.F16)] == [1e-5, 2e-3, 2e-3]
    assert [rank.is_f32 for rank in Rank] == [True, True, False, False, False]


def test_rows_of_a_probe_are_like_a_norm_s() -> None:
    draw = random.Random(1)
    rows = probe_rows(draw, 5, 400)
    assert rows.dtype == np.float32
    assert np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1)) == pytest.approx(np.ones(5), rel=1e-5)
    large = np.abs(rows).mean(axis=0) > 2.5
    assert 1 <= large.sum() <= 4
    assert not np.array_equal(rows, probe_rows(draw, 5, 400))  # drawn afresh


@pytest.mark.parametrize("held", [1, 2, 3, 4, 9, 60])
def test_a_probe_asks_for_about_eight_rows_of_some_experts(held: int) -> None:
    count, pairs = probe_pairs(random.Random(1), list(range(10, 10 + held)))
    experts = min(held, MOST_EXPERTS)
    assert len(pairs) == count * experts
    assert ROWS <= len(pairs) < ROWS + experts
    assert len({tuple(pair) for pair in pairs.tolist()}) == len(pairs)
    assert len(set(pairs[:, 1].tolist())) == experts
    assert pairs[:, 0].tolist() == sorted(pairs[:, 0].tolist())  # as a batch asks


@pytest.mark.parametrize("has_biases", [False, True])
def test_the_oracle_knows_every_row_of_a_model(tmp_path: Path, has_biases: bool) -> None:
    model = TinyExperts(tmp_path / "tiny.gguf", has_biases=has_biases)
    oracle, (x, _) = Oracle(model), some_rows(model)
    for layer, expert in ((0, 0), (2, 3)):
        rows = model.local().rows(layer, expert, x)
        own = oracle.rows(class_text(model.numeric_class), layer, expert, x)
        assert own is not None
        assert same_bits(own, rows)
        assert 0 < oracle.error(layer, expert, x, rows) < 1e-6
        wide = exact.expert_rows(model.weights(layer, expert), x)
        assert np.array_equal(exact.expert_rows(expert_of(model, layer, expert), x), wide)
        assert oracle.error(layer, expert, x, model.local().rows(layer, expert ^ 1, x)) > 0.1
        assert oracle.error(layer, expert, x, rows * np.float32(np.nan)) == math.inf
    assert oracle.rows("another/f32/f32", 0, 0, x) is None
    assert oracle.own_class == class_text(model.numeric_class)


def test_kinds_are_the_same_for_layers_of_the_same_kernels(tmp_path: Path) -> None:
    model = TinyExperts(tmp_path / "tiny.gguf")
    assert kind_of(model, 0) == kind_of(model, 1)
    assert kind_of(model, 0) != kind_of(TinyExperts(tmp_path / "wide.gguf", inner=64), 0)
    assert kind_of(model, 0) != kind_of(TinyExperts(tmp_path / "biased.gguf", has_biases=True), 0)
    assert class_text(NumericClass(name="a", activations="i16")) == "a/i16/f32"


def test_bits_and_distances() -> None:
    rows = np.array([[3, 4], [0, 1]], np.float32)
    assert same_bits(rows, rows.copy())
    assert not same_bits(rows, -rows)
    assert not same_bits(np.zeros(1, np.float32), -np.zeros(1, np.float32))
    assert differing(rows, rows.copy()).tolist() == []
    assert differing(rows, np.array([[3, 4], [-0.0, 1]], np.float32)).tolist() == [1]
    assert differing(rows * np.float32(np.nan), rows * np.float32(np.nan)).tolist() == []  # the same bits
    assert distance(rows * np.float32(1.5), rows) == pytest.approx(0.5)
    assert distance(rows * np.float32(np.nan), rows) == math.inf
    assert distance(rows, np.full_like(rows, np.inf)) == math.inf
