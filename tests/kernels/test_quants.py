"""Every quant format against the `gguf` package, bit for bit, on random blocks and on real files."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from shared_data import SHARED, needs_shared

from kernels.formats import FORMATS, GGMLType, row_bytes
from kernels.gguf import open_gguf
from kernels.matrix import TILE_BYTES, Matrix
from kernels.quants import Quant, dequantise


def oracle(type_: GGMLType, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(type_))), np.float32)


def assert_same_bits(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    same = ours.view(np.uint32) == theirs.view(np.uint32)
    same |= np.isnan(ours) & np.isnan(theirs)  # which NaN it is says nothing
    assert same.all(), f"{(~same).sum()} of {same.size} values differ, first at {np.argwhere(~same)[0]}"


def test_every_format_has_a_class() -> None:
    assert set(Quant.by_type) == set(FORMATS) == set(GGMLType)


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
@pytest.mark.parametrize("seed", range(4))
def test_random_blocks(type_: GGMLType, seed: int) -> None:
    # Random bytes hold every kind of scale: subnormal, infinite, not a number.
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (37, FORMATS[type_].nbytes * 12), dtype=np.uint8)
    assert_same_bits(dequantise(type_, data), oracle(type_, data))


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_every_value_of_every_byte(type_: GGMLType) -> None:
    """Each byte of a block takes all 256 values while the others stay: no bit of the layout is left out."""
    form = FORMATS[type_]
    data = np.full((form.nbytes * 256, form.nbytes), 0x35, np.uint8)
    at = np.arange(form.nbytes * 256)
    data[at, at // 256] = at % 256
    assert_same_bits(dequantise(type_, data), oracle(type_, data))


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_rows_at_odd_addresses(type_: GGMLType) -> None:
    size = FORMATS[type_].nbytes * 8
    buffer = np.random.default_rng(5).integers(0, 256, 3 * size + 1, dtype=np.uint8)
    shifted = buffer[1:].reshape(3, size)
    assert_same_bits(dequantise(type_, shifted), oracle(type_, shifted.copy()))


def test_f32_rows_are_not_copied() -> None:
    data = np.zeros((4, 64), np.uint8)
    assert np.shares_memory(dequantise(GGMLType.F32, data), data)


@needs_shared
def test_real_files() -> None:
    assert SHARED is not None
    files = sorted((SHARED / "golden" / "archs").glob("*-Q*.gguf")) + [SHARED / "models" / "verse-moe-q4_k_m.gguf"]
    seen = set()
    for path in files:
        with open_gguf(path) as file:
            for name, info in file.tensors.items():
                seen.add(info.type)
                rows = file.data(name).reshape(-1, row_bytes(info.type, info.dims[0]))
                assert_same_bits(dequantise(info.type, rows), oracle(info.type, rows))
    assert {GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.F16} <= seen


def test_every_half() -> None:
    """All 65,536 F16 values: alone, so that one that is not finite does not decide the way of the others, and at once."""
    halves = np.arange(1 << 16, dtype="<u2")
    data = halves.view(np.uint8)
    assert_same_bits(dequantise(GGMLType.F16, data.reshape(1, -1)), oracle(GGMLType.F16, data.reshape(1, -1)))
    for sign in (0, 0x8000):
        finite = (halves[:0x7C00] | sign).view(np.uint8).reshape(31, -1)
        assert_same_bits(dequantise(GGMLType.F16, finite), oracle(GGMLType.F16, finite))
        for special in (0x7C00, 0x7C01, 0x7FFF):
            row = np.array([0, 1, special | sign, 0x3C00], "<u2").view(np.uint8).reshape(1, -1)
            assert_same_bits(dequantise(GGMLType.F16, row), oracle(GGMLType.F16, row))


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_rows_and_read_only_bytes(type_: GGMLType, rows: int) -> None:
    """One block a row and none at all; what is mapped can not be written to."""
    data = np.random.default_rng(rows).integers(0, 256, (rows, FORMATS[type_].nbytes), dtype=np.uint8)
    before = data.copy()
    data.flags.writeable = False
    ours = dequantise(type_, data)
    assert ours.shape == (rows, FORMATS[type_].block)
    if rows:
        assert_same_bits(ours, oracle(type_, data))
    assert np.array_equal(data, before)


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_chosen_columns_of_a_wider_buffer(type_: GGMLType) -> None:
    wide = np.random.default_rng(6).integers(0, 256, (5, FORMATS[type_].nbytes * 4 + 3), dtype=np.uint8)
    rows = wide[::2, 1 : 1 + FORMATS[type_].nbytes * 4]
    assert_same_bits(dequantise(type_, rows), oracle(type_, rows.copy()))


def test_rows_must_hold_whole_blocks() -> None:
    with pytest.raises(ValueError, match="rows of 35 bytes do not hold whole Q8_0 blocks of 34 bytes"):
        dequantise(GGMLType.Q8_0, np.zeros((2, 35), np.uint8))


def test_tiles_cover_a_matrix_once_and_depend_on_its_shape_alone() -> None:
    cols, rows = 2048, 300
    data = np.random.default_rng(1).integers(0, 256, rows * row_bytes(GGMLType.Q8_0, cols), dtype=np.uint8)
    matrix = Matrix.of(GGMLType.Q8_0, rows, cols, data)
    tiles = list(matrix.tiles())
    assert [part.start for part, _ in tiles] == list(range(0, rows, TILE_BYTES // (4 * cols)))
    assert_same_bits(np.concatenate([tile for _, tile in tiles]), dequantise(matrix.type, matrix.data))
    chosen = np.array([7, 299, 7])
    assert_same_bits(matrix.take(chosen), dequantise(matrix.type, matrix.data)[chosen])
    with pytest.raises(ValueError, match="652799 bytes for a Q8_0 matrix 300 x 2048"):
        Matrix.of(GGMLType.Q8_0, rows, cols, data[1:])
