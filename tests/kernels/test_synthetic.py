"""Random weights: of the size of a model's, the same bytes everywhere, and what they are refused for."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from kernels.formats import FORMATS, GGMLType
from kernels.quants import dequantise
from kernels.synthetic import expert, floats, matrix, stream


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
@pytest.mark.parametrize("cols", [256, 2048])
def test_values_are_of_a_models_size(type_: GGMLType, cols: int) -> None:
    made = matrix(stream(1, type_.name), type_, 64, cols)
    values = dequantise(type_, made.data) * math.sqrt(cols)
    assert (made.rows, made.cols, made.nbytes) == (64, cols, 64 * cols // FORMATS[type_].block * FORMATS[type_].nbytes)
    assert np.isfinite(values).all()
    assert 0.7 < values.std() < 1.5
    assert abs(values.mean()) < 0.15


def test_activations_are_nearly_normal() -> None:
    x = floats(stream("x"), 50, 2000)
    assert x.dtype == np.float32
    assert x.std() == pytest.approx(1, abs=0.01)
    assert abs(x.mean()) < 0.01
    assert 3 < abs(x).max() < 4
    assert 0.64 < (abs(x) < 1).mean() < 0.70


def test_the_same_seed_gives_the_same_bytes_whatever_numpy() -> None:
    # A digest each: two machines compare what they compute only if they compute with the same.
    found = {
        type_.name: hashlib.sha256(matrix(stream(7, type_.name), type_, 4, 512).data.tobytes()).hexdigest()[:12]
        for type_ in (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.MXFP4)
    }
    assert found == {
        "F32": "64dd1893443b",
        "F16": "d9fdc853f701",
        "BF16": "4e44691515b5",
        "Q8_0": "889647cf3094",
        "Q4_K": "47f529ebe69b",
        "MXFP4": "48c696cbe591",
    }
    x = floats(stream("x", 3), 5, 7)
    assert hashlib.sha256(x.tobytes()).hexdigest()[:12] == "e3515a02360b"


def test_other_seeds_give_other_bytes() -> None:
    a, b, c = (matrix(stream(*seed), GGMLType.Q8_0, 4, 64).data.tobytes() for seed in ((1,), (2,), ("1",)))
    assert len({a, b, c}) == 3


def test_an_experts_matrices_differ_and_fit_together() -> None:
    made = expert(stream(1), GGMLType.Q4_0, 64, 96, activation="gelu")
    assert [(m.rows, m.cols) for m in (made.gate, made.up, made.down)] == [(96, 64), (96, 64), (64, 96)]
    assert made.activation == "gelu"
    assert (made.gate.data != made.up.data).any()


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="row length 100 is no multiple of Q4_K's block of 256 values"):
        matrix(stream(1), GGMLType.Q4_K, 4, 100)
