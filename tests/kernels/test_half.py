"""Rows in F16: rounded as numpy rounds, and whole where F16 cannot hold them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kernels.half import ULP, halved, packed, unpacked

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MOST = (2 - 2.0**-10) * 2.0**127  #: of 11 bits


def test_values_by_hand() -> None:
    x = np.array([[1.0, 1 + 2.0**-12, 1 + 2.0**-11 + 2.0**-20, -(2.0**-24), 1e-12]], np.float32)
    assert halved(x).tolist() == [[1.0, 1.0, 1 + 2.0**-10, -(2.0**-24), 0.0]]


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-30, 2.0**20, 2.0**110])
def test_a_row_of_any_size_keeps_its_bits(scale: float) -> None:
    """Numpy's own rounding of a row of ordinary size, in any size: every value within half a step of itself."""
    x = np.random.default_rng(1).uniform(1, 2, (3, 50)).astype(np.float32)
    assert (halved(x) == x.astype(np.float16)).all()
    assert (halved(x * np.float32(scale)) == halved(x) * np.float32(scale)).all()


def test_what_would_be_rounded_to_infinity_is_not() -> None:
    x = np.array([[3.402e38, -3.4028234e38, 1e30], [3.402e38, np.inf, 1.0]], np.float32)
    out = halved(x)
    assert out[0, :2].tolist() == [MOST, -MOST]
    assert out[1, 1] == np.inf
    assert unpacked(packed(x, "f16").tobytes(), (2, 4), "f16")[0].tobytes() == out[0].tobytes()


def test_each_row_has_its_own_scale() -> None:
    x = np.array([[1e30, 1.0], [1e-30, 1e-31], [0.0, -0.0]], np.float32)
    out = halved(x)
    assert out[0, 0] == pytest.approx(1e30, rel=2.0**-11)
    assert out[0, 1] == 0
    assert out[1] == pytest.approx(x[1], rel=2.0**-11)
    assert out[2].tobytes() == x[2].tobytes()


@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=3, max_side=5), elements=FINITE))
def test_whatever_comes(x: np.ndarray) -> None:  # type: ignore[type-arg]
    out = halved(x)
    assert out.dtype == np.float32
    assert halved(out).tobytes() == out.tobytes()  # what is rounded stays
    largest = np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True)
    # Half a step of each value, or of the smallest that is kept beside the row's largest, or of F32 itself.
    step = np.maximum(np.abs(x.astype(np.float64)) * 2.0**-11, np.maximum(largest * 2.0**-39, 2.0**-150))
    step = np.where(np.abs(x) > MOST, 2.0**117, step)
    assert (np.abs(out.astype(np.float64) - x) <= step).all()
    carried = packed(x, "f16")
    assert (carried.dtype, carried.shape) == (np.float16, (*x.shape[:-1], x.shape[-1] + 1))
    assert unpacked(carried.tobytes(), carried.shape, "f16").tobytes() == out.tobytes()
    assert packed(out, "f16").tobytes() == carried.tobytes()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = np.array([[1.0, bad], [1.0, 2.0]], np.float32)
    for out in (halved(x), unpacked(packed(x, "f16").tobytes(), (2, 3), "f16")):
        assert not np.isfinite(out[0]).all()
        assert out[1].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("exponent", [0.5, 300.0, -300.0, np.inf, np.nan])
def test_an_exponent_that_is_none_gives_no_numbers(exponent: float) -> None:
    carried = np.array([[1.0, 2.0, exponent], [1.0, 2.0, 15.0]], np.float16)
    out = unpacked(carried.tobytes(), carried.shape, "f16")
    assert np.isnan(out[0]).all()
    assert out[1].tolist() == [1.0, 2.0]


def test_there_and_back() -> None:
    x = np.random.default_rng(1).standard_normal((3, 7)).astype(np.float32)
    carried = packed(x, "f32")
    assert carried is x
    assert unpacked(memoryview(carried), x.shape, "f32").tobytes() == x.tobytes()


def test_two_roundings_of_neighbours_are_no_farther_apart_than_said() -> None:
    between = 1 + (2 * np.arange(1024, dtype=np.float64)[:, None] + 1) * 2.0**-11  # two values that F16 has
    for exponent in range(-14, 15):
        middle = (between * 2.0**exponent).astype(np.float32)
        below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
        apart = (halved(above) - halved(below)) / middle
        assert 0 < apart.min() <= apart.max() <= ULP
