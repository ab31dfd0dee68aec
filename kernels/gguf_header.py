"""The head of a GGUF file: metadata and tensor table, every count and length checked against the file before use.

Knows nothing of tensors' data, nor of split files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .errors import GGUFError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
#: The least that a key with its value, and a tensor's entry, can take.
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8


class Strings(Sequence[str]):
    """An array of strings in the file, decoded when asked for. GGUFError for one that is not UTF-8."""

    def __init__(self, data: bytes, ends: NDArray[np.int64], where: str) -> None:
        self._data, self._ends, self._where = data, ends, where

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        # Each string stands behind its length, in 8 bytes.
        start = 8 + (int(self._ends[at - 1]) if at else 0)
        return self._decoded(at, start, int(self._ends[at]))

    def __iter__(self) -> Iterator[str]:
        start = 8
        for at, end in enumerate(self._ends.tolist()):
            yield self._decoded(at, start, end)
            start = end + 8

    def _decoded(self, at: int, start: int, end: int) -> str:
        try:
            return self._data[start:end].decode("utf-8")
        except UnicodeDecodeError:
            raise GGUFError(f"{self._where}: string {at} is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the table has it; `offset` counts from the beginning of the data."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the data, which begins at byte `data_start`."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    alignment: int
    data_start: int


class _Cursor:
    """Reads on, never past the end of the file."""

    def __init__(self, view: memoryview, path: str) -> None:
        self.view, self.path, self.at = view, path, 0

    def fail(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {message}")

    def need(self, count: int, what: str) -> int:
        start = self.at
        if count > len(self.view) - start:
            raise self.fail(
                f"{what} needs {count} bytes at {start}, and the file ends at {len(self.view)}; it is damaged"
            )
        self.at = start + count
        return start

    def number(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.view, self.need(struct.calcsize(form), what))[0]

    def count(self, what: str, least: int) -> int:
        """A count of things that take at least so many bytes each: refused at once when they cannot all be there."""
        count: int = self.number("<Q", what)
        if count > (len(self.view) - self.at) // least:
            raise self.fail(f"{what} is {count}, more than the {len(self.view)} bytes of the file can hold")
        return count

    def string(self, what: str) -> str:
        length: int = self.number("<Q", f"the length of {what}")
        start = self.need(length, what)
        try:
            return bytes(self.view[start : start + length]).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {start} is not UTF-8") from None

    def value(self, key: str) -> Any:
        kind: int = self.number("<I", f"the type of {key!r}")
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self.fail(f"{key!r} has the unknown value type {kind}")
        return self.number(_SCALARS[kind], f"the value of {key!r}")

    def _array(self, key: str) -> Any:
        kind: int = self.number("<I", f"the type of {key!r}")
        if kind == _STRING:
            return self._strings(key, self.count(f"the length of {key!r}", 8))
        if kind not in _DTYPES:
            word = "nested array" if kind == _ARRAY else f"unknown value type {kind}"
            raise self.fail(f"{key!r} is an array of {word}s, which is not supported")
        dtype = np.dtype(_DTYPES[kind])
        count = self.count(f"the length of {key!r}", dtype.itemsize)
        start = self.need(count * dtype.itemsize, f"the values of {key!r}")
        return np.frombuffer(self.view, dtype, count, start)

    def _strings(self, key: str, count: int) -> Strings:
        first, end, view = self.at, len(self.view), self.view
        ends, at, length_at = np.empty(count, np.int64), first, struct.Struct("<Q").unpack_from
        for i in range(count):  # a vocabulary has some 100,000 of these: nothing is looked up in this loop
            if at + 8 > end or (at := at + 8 + length_at(view, at)[0]) > end:
                raise self.fail(f"string {i} of {count} of {key!r} reaches past the end of the file at {end}")
            ends[i] = at - first
        self.at = at
        return Strings(bytes(view[first:at]), ends, f"{self.path}: {key!r}")


def read_header(view: memoryview, path: str) -> Header:
    """Read and check the head of a file. GGUFError names file, place and numbers."""
    cursor = _Cursor(view, path)
    magic = bytes(view[:4])
    if magic != MAGIC:
        raise cursor.fail(f"the file begins with {magic!r}, not {MAGIC!r}; this is no GGUF file")
    cursor.at = 4
    version: int = cursor.number("<I", "the version")
    if version not in VERSIONS:
        if version and not version & 0xFFFF:
            raise cursor.fail("the file is big-endian; convert it to a little-endian one")
        raise cursor.fail(f"GGUF version {version} is not supported, versions 2 and 3 are; convert the model again")
    tensor_count: int = cursor.number("<Q", "the number of tensors")
    key_count = cursor.count("the number of keys", _LEAST_KEY_BYTES)
    metadata = dict[str, Any]()
    for i in range(key_count):
        key = cursor.string(f"key {i} of {key_count}")
        if key in metadata:
            raise cursor.fail(f"the key {key!r} comes twice")
        metadata[key] = cursor.value(key)
    if tensor_count > (len(view) - cursor.at) // _LEAST_TENSOR_BYTES:
        raise cursor.fail(f"the number of tensors is {tensor_count}, more than the {len(view)} bytes can hold")
    tensors = tuple(_tensor(cursor, i, tensor_count) for i in range(tensor_count))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}; it must be a power of two")
    return Header(metadata, tensors, alignment, -(-cursor.at // alignment) * alignment)


def _tensor(cursor: _Cursor, index: int, total: int) -> TensorEntry:
    name = cursor.string(f"the name of tensor {index} of {total}")
    dim_count: int = cursor.number("<I", f"tensor {name}: its number of dimensions")
    if not 1 <= dim_count <= MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {dim_count} dimensions; from 1 to {MAX_DIMS} are allowed")
    dims = tuple(cursor.number("<Q", f"tensor {name}: dimension {d}") for d in range(dim_count))
    type_id: int = cursor.number("<I", f"tensor {name}: its type")
    offset: int = cursor.number("<Q", f"tensor {name}: its offset")
    return TensorEntry(name, dims, type_id, offset)
