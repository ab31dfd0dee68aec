"""Damaged GGUF files: each opens and can be read whole, or ends in the project's own error, within bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygguf import small

from kernels.errors import GGUFError
from kernels.gguf import open_gguf
from kernels.gguf_header import read_header

WHOLE = small().bytes()
MEMORY_LIMIT = 4 << 20  #: bytes; the file has about 1 KiB


def outcome(path: Path, data: bytes) -> bool:
    """Whether the file opened; then everything in it was read."""
    path.write_bytes(data)
    try:
        with open_gguf(path) as file:
            for value in file.metadata.values():
                list(value) if hasattr(value, "__len__") else value
            for name, info in file.tensors.items():
                assert file.data(name).size == info.nbytes <= len(data)
    except GGUFError as error:
        assert "\n" not in str(error)
        assert str(error).startswith(str(path))
        return False
    return True


def test_every_truncation_and_ten_thousand_changed_bytes(tmp_path: Path) -> None:
    path, opened = tmp_path / "fuzz.gguf", 0
    random = np.random.default_rng(7)
    tracemalloc.start()
    try:
        for length in range(len(WHOLE)):
            assert not outcome(path, WHOLE[:length]) or length >= len(WHOLE) - 32
        head = len(WHOLE) - len(small().data)
        for at, new in zip(random.integers(0, head, 10_000), random.integers(1, 256, 10_000), strict=True):
            changed = bytearray(WHOLE)
            changed[at] ^= new
            opened += outcome(path, bytes(changed))
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
    finally:
        tracemalloc.stop()
    assert 1000 < opened < 9000  # both outcomes were met, many times


BOUNDARY = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 12, 13, 31, 32, 33, 63, 255, 256, 65535, 1 << 31, (1 << 32) - 1])
WIDE = st.sampled_from([(1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 32, 1 << 62, 1 << 40])


@given(at=st.integers(0, len(WHOLE) - 8), value=st.one_of(BOUNDARY, WIDE), wide=st.booleans())
@settings(max_examples=3000, deadline=None)
def test_counts_lengths_and_offsets_at_their_bounds(at: int, value: int, wide: bool) -> None:
    changed = bytearray(WHOLE)
    struct.pack_into("<Q" if wide else "<I", changed, at, value if wide else value & 0xFFFFFFFF)
    try:
        header = read_header(memoryview(bytes(changed)), "x.gguf")
    except GGUFError as error:
        assert str(error).startswith("x.gguf: ")
    else:
        # However the head was cut, the data begins behind what was read of it, in the file or just at its end.
        assert header.data_start % header.alignment == 0
        assert all(1 <= len(entry.dims) <= 4 for entry in header.tensors)


@given(st.binary(max_size=400))
@settings(max_examples=500, deadline=None)
def test_noise_behind_the_magic(noise: bytes) -> None:
    try:
        read_header(memoryview(b"GGUF\x03\0\0\0" + noise), "x.gguf")
    except GGUFError as error:
        assert "\n" not in str(error)
