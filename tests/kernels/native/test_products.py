"""Products in the canonical order: bits against an emulation, and accuracy against float64."""

from __future__ import annotations

from fractions import Fraction

import canonical
import numpy as np
import pytest
from native_kit import (
    F32,
    bound,
    f32_matrix,
    given,
    native,
    operation,
    random_blocks,
    result,
    rows_of,
    run,
    same_bits,
    weights,
)

from kernels.formats import FORMATS, GGMLType
from kernels.matrix import Matrix
from kernels.quants import dequantise

WIDTHS = (1, 2, 8, 9, 64, 256)
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def cases() -> list[tuple[GGMLType, int]]:
    """Types with row lengths: whole blocks of 256, and whatever else a type can have."""
    found = [(type_, 512) for type_ in GGMLType]
    found += [(type_, 96) for type_ in GGMLType if FORMATS[type_].block <= 32]
    return found + [(type_, cols) for type_ in FLOATS for cols in (1, 31, 40, 100)]


def products(matrix: Matrix, x: F32, threads: int = 1) -> F32:
    """matrix times each row of x, in one batch."""
    operations = [given(0, x), operation("matmul", (0,), (1,), weight=matrix)]
    return result(operations, len(x), 1, native(threads))


def test_the_emulated_fma_rounds_once() -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(4000).astype(np.float32) for _ in range(3))
    c *= (2.0 ** random.integers(-40, 40, 4000)).astype(np.float32)
    c[::7] = -(a * b)[::7]  # nearly everything cancels
    a[::5] *= np.float32(2.0**-75)
    b[::5] *= np.float32(2.0**-60)  # subnormal products
    c[::10] *= np.float32(2.0**-120)
    for x, y, z, ours in zip(a, b, c, canonical.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [np.nextafter(ours, np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(ours)) - exact) <= abs(Fraction(float(n)) - exact) for n in near)


@pytest.mark.parametrize(("type_", "cols"), cases(), ids=lambda v: str(getattr(v, "name", v)))
def test_bits_at_every_width(type_: GGMLType, cols: int) -> None:
    random = np.random.default_rng(cols)
    matrix = weights(type_, 29, cols, random)  # a tile of 24, a group of 4, and one more
    x = (random.standard_normal((WIDTHS[-1], cols)) * 2.0 ** random.integers(-9, 9, (1, cols))).astype(np.float32)
    expected = canonical.products(dequantise(type_, matrix.data), x)
    for width in WIDTHS:
        same_bits(products(matrix, x[:width]), expected[:width])
    same_bits(products(matrix, x[5:6]), expected[5:6])


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_bits_with_every_kind_of_finite_scale(type_: GGMLType) -> None:
    """Subnormal weights and products, sums that overflow."""
    random = np.random.default_rng(int(type_))
    data = random_blocks(type_, 7 * 512 // FORMATS[type_].block, random).reshape(7, -1)
    x = random.standard_normal((9, 512)).astype(np.float32)
    x[3], x[4] = x[3] * np.float32(2.0**-140), x[4] * np.float32(2.0**100)
    with np.errstate(all="ignore"):
        expected = canonical.products(dequantise(type_, data), x)
    matrix = Matrix.of(type_, 7, 512, data.reshape(-1))
    together = products(matrix, x)
    finite = np.isfinite(expected)
    same_bits(together[finite], expected[finite])
    assert not np.isfinite(together[~finite]).any()
    same_bits(np.concatenate([products(matrix, row[None]) for row in x]), together)


@pytest.mark.parametrize(("type_", "cols"), cases(), ids=lambda v: str(getattr(v, "name", v)))
def test_the_worst_row_is_within_1e_5_of_float64(type_: GGMLType, cols: int) -> None:
    random = np.random.default_rng(cols + 1)
    matrix, x = weights(type_, 61, cols, random), random.standard_normal((33, cols)).astype(np.float32)
    exact = x.astype(np.float64) @ dequantise(type_, matrix.data).astype(np.float64).T
    error = np.linalg.norm(products(matrix, x) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error.max() <= 1e-5
    # One output a row and all of them apart: a single wrong one would hide in a norm.
    scale = np.abs(x).astype(np.float64) @ np.abs(dequantise(type_, matrix.data)).astype(np.float64).T
    assert (np.abs(products(matrix, x) - exact) <= 1e-6 * scale).all()


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q4_K, GGMLType.Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 5, 47, 48, 49, 333])
def test_bits_do_not_depend_on_threads_or_on_how_many_rows_a_matrix_has(type_: GGMLType, rows: int) -> None:
    random = np.random.default_rng(rows)
    matrix, x = weights(type_, rows, 256, random), random.standard_normal((300, 256)).astype(np.float32)
    together = products(matrix, x)
    assert together.tobytes() == products(matrix, x, threads=3).tobytes()
    alone = Matrix.of(type_, 1, 256, matrix.data[-1])
    same_bits(products(alone, x), together[:, -1:].copy())
    for at in (0, 255, 256, 299):  # rows of activations are taken 256 at a time
        same_bits(products(matrix, x[at : at + 1], threads=2), together[at : at + 1])


def test_a_row_that_ends_where_a_buffer_ends_and_what_lies_behind_it() -> None:
    """Values behind a row that does not fill its lanes are another row's, or nobody's; NaN there would show."""
    random = np.random.default_rng(4)
    w, x = random.standard_normal((30, 40)).astype(np.float32), random.standard_normal((12, 40)).astype(np.float32)
    x[1::2] = np.nan
    ours = products(f32_matrix(w), x)
    same_bits(ours[::2].copy(), canonical.products(w, x[::2].copy()))
    assert np.isnan(ours[1::2]).all()


def test_the_wanted_rows_alone_reach_the_head() -> None:
    random = np.random.default_rng(5)
    x, head = random.standard_normal((11, 64)).astype(np.float32), weights(GGMLType.Q8_0, 70, 64, random)
    operations = [given(0, x), operation("last", (0,), (0,)), operation("matmul", (0,), (1,), weight=head)]
    for threads in (1, 3):
        program = bound(operations, native(threads))
        for wanted in ([10], [0, 3, 10], list(range(11))):
            ours = run(program, operations, rows_of(11, program.sequence(), wanted=wanted), 1)
            same_bits(ours, products(head, x[wanted]))
