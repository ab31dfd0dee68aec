"""Damaged GGUF files: each opens and can be read whole, or ends in the project's own error, within bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tinygguf as t
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygguf import Tiny, small

from kernels.errors import GGUFError
from kernels.formats import row_bytes
from kernels.gguf import open_gguf
from kernels.quants import dequantise

WHOLE = small().bytes()
HEAD = len(WHOLE) - len(small().data)
MEMORY_LIMIT = 1 << 20  #: bytes; the file has about 1 KiB


def outcome(path: Path, data: bytes) -> bool:
    """Whether the file opened; then everything in it was read."""
    path.write_bytes(data)
    return outcome_of_written(path, len(data))


def outcome_of_written(path: Path, size: int) -> bool:
    try:
        with open_gguf(path) as file:
            for value in file.metadata.values():
                list(value) if hasattr(value, "__len__") else value
            for name, info in file.tensors.items():
                content = file.data(name)
                assert content.size == info.nbytes <= size
                dequantise(info.type, content.reshape(-1, row_bytes(info.type, info.dims[0])))
    except GGUFError as error:
        assert "\n" not in str(error)
        assert str(error).startswith(str(path.parent))
        assert len(str(error)) < len(str(path)) + 500
        return False
    return True


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
    finally:
        tracemalloc.stop()


def test_every_truncation_and_ten_thousand_changed_bytes(tmp_path: Path) -> None:
    path, opened = tmp_path / "fuzz.gguf", 0
    random = np.random.default_rng(7)
    assert outcome(path, WHOLE)
    with bounded_memory():
        for length in range(len(WHOLE)):
            assert not outcome(path, WHOLE[:length])
        for at, new in zip(random.integers(0, HEAD, 10_000), random.integers(1, 256, 10_000), strict=True):
            changed = bytearray(WHOLE)
            changed[at] ^= new
            opened += outcome(path, bytes(changed))
    assert 1000 < opened < 9000  # both outcomes were met, many times


@pytest.fixture(scope="module")
def fuzz_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzz.gguf"


BOUNDARY = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 12, 13, 31, 32, 33, 63, 255, 256, 65535, 1 << 31, (1 << 32) - 1])
WIDE = st.sampled_from([(1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 32, 1 << 62, 1 << 40])


@given(
    changes=st.lists(
        st.tuples(st.integers(0, HEAD - 8), st.one_of(BOUNDARY, WIDE), st.booleans()), min_size=1, max_size=3
    )
)
@settings(max_examples=3000, deadline=None)
def test_numbers_at_their_bounds_anywhere(fuzz_path: Path, changes: list[tuple[int, int, bool]]) -> None:
    changed = bytearray(WHOLE)
    for at, value, wide in changes:
        struct.pack_into("<Q" if wide else "<I", changed, at, value if wide else value & 0xFFFFFFFF)
    outcome(fuzz_path, bytes(changed))


SIZES = st.one_of(BOUNDARY, WIDE, st.integers(0, 200))
DIMS = st.lists(SIZES, max_size=5).map(tuple)


@given(
    tensors=st.lists(st.tuples(st.sampled_from(["a", "b", "\n", ""]), DIMS, st.integers(0, 45), SIZES), max_size=3),
    counts=st.tuples(st.none() | SIZES, st.none() | SIZES),
    alignment=SIZES,
    data=st.binary(max_size=300),
)
@settings(max_examples=1500, deadline=None)
def test_well_formed_files_with_wild_numbers(
    fuzz_path: Path,
    tensors: list[tuple[str | bytes, tuple[int, ...], int, int]],
    counts: tuple[int | None, int | None],
    alignment: int,
    data: bytes,
) -> None:
    tiny = Tiny(tensors=tensors, tensor_count=counts[0], key_count=counts[1], data=data)
    outcome(fuzz_path, tiny.key("general.alignment", t.U64, alignment).bytes())


@given(st.binary(max_size=400))
@settings(max_examples=1000, deadline=None)
def test_noise_behind_the_magic(fuzz_path: Path, noise: bytes) -> None:
    outcome(fuzz_path, b"GGUF\x03\0\0\0" + noise)


def test_changed_bytes_in_either_part_of_a_split_file(tmp_path: Path) -> None:
    parts = []
    for i in range(2):
        tiny = Tiny().key("split.no", t.U16, i).key("split.count", t.U16, 2).key("split.tensors.count", t.I32, 2)
        path = tmp_path / f"m-{i + 1:05}-of-00002.gguf"
        parts.append((path, tiny.tensor(f"w{i}", (8,), 0, bytes(32)).bytes()))
    for path, data in parts:
        path.write_bytes(data)
    first = parts[0][0]
    assert outcome_of_written(first, 32)
    random, opened = np.random.default_rng(11), 0
    with bounded_memory():
        for path, data in parts:
            head = len(data) - 32
            for at, new in zip(random.integers(0, head, 1500), random.integers(1, 256, 1500), strict=True):
                changed = bytearray(data)
                changed[at] ^= new
                path.write_bytes(bytes(changed))
                # A change of split.count can make the first part a whole model; then it opens alone.
                opened += outcome_of_written(first, 64)
            path.write_bytes(data)
    assert 50 < opened < 2500
