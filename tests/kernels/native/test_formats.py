"""Every quant type in C gives the bits of `kernels.quants`, which is tested against the `gguf` package."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native_kit import F32, QUANTISED, given, native, operation, random_blocks, result, same_bits

from kernels.formats import FORMATS, GGMLType
from kernels.matrix import Matrix
from kernels.native.memory import aligned, filled
from kernels.native.structs import CMatrix
from kernels.quants import dequantise


def dequantised(matrix: Matrix) -> F32:
    """Rows [rows, cols filled up to whole lanes] as C sees them."""
    out = aligned(matrix.rows * filled(matrix.cols))
    out[:] = np.nan
    native()._library.swarm_dequantise(ctypes.byref(CMatrix.of(matrix)), out.ctypes.data)
    return out.reshape(matrix.rows, -1)


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_with_every_kind_of_finite_scale(type_: GGMLType, seed: int) -> None:
    block = FORMATS[type_].block
    data = random_blocks(type_, 41 * 768 // block, np.random.default_rng(seed)).reshape(41, -1)
    matrix = Matrix.of(type_, 41, 768, data.reshape(-1))
    same_bits(dequantised(matrix), dequantise(type_, data))


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_every_value_of_every_byte(type_: GGMLType) -> None:
    """Each byte of a block takes all 256 values while the others stay: no bit of the layout is left out."""
    form = FORMATS[type_]
    repeat = max(1, 32 // form.block)  # rows of whole lanes
    data = np.full((form.nbytes * 256, form.nbytes * repeat), 0x35, np.uint8)
    at = np.arange(form.nbytes * 256)
    data[at, at // 256] = at % 256
    expected = dequantise(type_, data)
    is_finite = np.isfinite(expected).all(axis=1)
    assert is_finite.mean() > 0.9
    ours = dequantised(Matrix.of(type_, len(data), form.block * repeat, data.reshape(-1)))
    same_bits(ours[is_finite], expected[is_finite])


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda t: t.name)
def test_scales_that_are_not_finite_stay_in_their_block(type_: GGMLType) -> None:
    form = FORMATS[type_]
    data = np.random.default_rng(1).integers(0, 256, (200, form.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantise(type_, data)
    is_finite = np.isfinite(expected).all(axis=1)
    assert not is_finite.all()
    ours = dequantised(Matrix.of(type_, 1, data.size // form.nbytes * form.block, data.reshape(-1)))
    same_bits(ours.reshape(200, -1)[is_finite], expected[is_finite])


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.F16, GGMLType.BF16], ids=lambda t: t.name)
@pytest.mark.parametrize("cols", [1, 7, 31, 33, 95, 100])
def test_rows_of_floats_that_do_not_fill_their_lanes_are_filled_up_with_zeros(type_: GGMLType, cols: int) -> None:
    data = random_blocks(type_, 9 * cols, np.random.default_rng(cols))
    ours = dequantised(Matrix.of(type_, 9, cols, data.reshape(-1)))
    same_bits(ours[:, :cols].copy(), dequantise(type_, data.reshape(9, -1)))
    assert not ours[:, cols:].view(np.uint32).any()


def test_every_half() -> None:
    halves = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    ours = dequantised(Matrix.of(GGMLType.F16, 1 << 11, 32, halves)).reshape(-1)
    same_bits(ours, dequantise(GGMLType.F16, halves.reshape(1, -1)).reshape(-1))


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_blocks_at_any_address(type_: GGMLType, shift: int) -> None:
    """A tensor may begin where it likes in a file's map."""
    data = random_blocks(type_, 1024 // FORMATS[type_].block, np.random.default_rng(shift)).reshape(-1)
    raw = np.zeros(len(data) + 64, np.uint8)
    start = -raw.ctypes.data % 32 + shift
    raw[start : start + len(data)] = data
    ours = dequantised(Matrix.of(type_, 1, 1024, raw[start : start + len(data)]))
    same_bits(ours, dequantise(type_, data.reshape(1, -1)))


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_embed_reads_the_rows_of_its_tokens(type_: GGMLType) -> None:
    cols = 512
    data = random_blocks(type_, 20 * cols // FORMATS[type_].block, np.random.default_rng(3)).reshape(20, -1)
    matrix = Matrix.of(type_, 20, cols, data.reshape(-1))
    ours = result([operation("embed", (), (0,), weight=matrix)], 20)
    same_bits(ours, dequantise(type_, data))


@pytest.mark.parametrize("cols", [1, 5, 33, 100])
def test_embed_of_rows_that_do_not_fill_their_lanes(cols: int) -> None:
    values = np.random.default_rng(cols).standard_normal((7, cols)).astype(np.float32)
    same_bits(result([given(0, values)], 7), values)
    halves = values.astype(np.float16)
    matrix = Matrix.of(GGMLType.F16, 7, cols, halves.view(np.uint8).reshape(-1))
    same_bits(result([operation("embed", (), (0,), weight=matrix)], 7), halves.astype(np.float32))
