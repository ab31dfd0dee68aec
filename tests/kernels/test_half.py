"""Rows in F16: rounded as numpy rounds, and whole where F16 cannot hold them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kernels.half import ULP, halved, packed, unpacked

LARGEST = 65504.0  #: that F16 has
ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)


def test_values_by_hand() -> None:
    x = np.array([[1.0, 1 + 2.0**-12, 1 + 2.0**-11 + 2.0**-20, 1e-8, -LARGEST]], np.float32)
    assert halved(x).tolist() == [[1.0, 1.0, 1 + 2.0**-10, 0.0, -LARGEST]]


def test_a_row_that_does_not_fit_is_left_as_it_is_and_its_neighbours_are_not() -> None:
    x = np.array([[0.1, 65520.0], [0.1, 65519.0]], np.float32)  # the second rounds down, to the largest
    out = halved(x)
    assert out[0].tobytes() == x[0].tobytes()
    assert out[1].tolist() == [float(np.float16(0.1)), LARGEST]
    kind, carried = packed(x, "f16")
    assert (kind, carried.dtype) == ("f32", np.float32)


@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=3, max_side=5), elements=ANY))
def test_whatever_comes(x: np.ndarray) -> None:  # type: ignore[type-arg]
    out = halved(x)
    assert out.dtype == np.float32
    assert halved(out).tobytes() == out.tobytes()
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float16)
    for at in np.ndindex(x.shape[:-1]):
        fits = np.isfinite(rounded[at]).all()
        assert out[at].tobytes() == (rounded[at].astype(np.float32) if fits else x[at]).tobytes()
    kind, carried = packed(x, "f16")
    assert (kind == "f16") is bool(np.isfinite(rounded).all())
    if kind == "f16":
        assert carried.nbytes == x.nbytes // 2
        assert unpacked(carried.tobytes(), x.shape, kind).tobytes() == out.tobytes()


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_there_and_back(kind: str) -> None:
    x = halved(np.random.default_rng(1).standard_normal((3, 7)).astype(np.float32))
    sent, carried = packed(x, kind)
    assert sent == kind
    assert unpacked(memoryview(carried), x.shape, sent).tobytes() == x.tobytes()


def test_two_roundings_of_neighbours_are_no_farther_apart_than_said() -> None:
    between = 1 + (2 * np.arange(1024, dtype=np.float64)[:, None] + 1) * 2.0**-11  # two values that F16 has
    for exponent in range(-14, 15):
        middle = (between * 2.0**exponent).astype(np.float32)
        below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
        apart = (halved(above) - halved(below)) / middle
        assert 0 < apart.min() <= apart.max() <= ULP
