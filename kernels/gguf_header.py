"""The head of a GGUF file: metadata and tensor table, every count and length checked against the file before use.

Knows nothing of tensors' data, nor of split files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import GGUFError
from .gguf_values import DAMAGED, Cursor, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
#: Far beyond any model: a key or a tensor costs many times its bytes in the file.
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 17
#: The least that a key with its value, and a tensor's entry, can take.
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


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


def whole_number(metadata: Mapping[str, Any], key: str, default: int, path: str) -> int:
    """A key's whole number, or the default where there is no such key. GGUFError for anything else."""
    value = metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise GGUFError(f"{path}: {key} must be a whole number; convert the model again")
    return value


def read_header(view: memoryview, path: str) -> Header:
    """Read and check the head of a file. GGUFError names file, place and numbers."""
    cursor = Cursor(view, path)
    _check_format(cursor)
    tensor_count: int = cursor.number("<Q", "the number of tensors")
    metadata = _metadata(cursor)
    cursor.check_count(tensor_count, "the number of tensors", _LEAST_TENSOR_BYTES, MAX_TENSORS)
    tensors = tuple(_tensor(cursor, i, tensor_count) for i in range(tensor_count))
    alignment = whole_number(metadata, "general.alignment", DEFAULT_ALIGNMENT, path)
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment}; it must be a power of two; convert the model again")
    return Header(metadata, tensors, alignment, -(-cursor.at // alignment) * alignment)


def _check_format(cursor: Cursor) -> None:
    magic = bytes(cursor.view[:4])
    if magic != MAGIC:
        raise cursor.fail(f"the file begins with {magic!r}, not {MAGIC!r}; this is no GGUF file")
    cursor.at = 4
    version: int = cursor.number("<I", "the version")
    if version not in VERSIONS:
        if version and not version & 0xFFFF:
            raise cursor.fail("the file is big-endian; convert it to a little-endian one")
        raise cursor.fail(f"GGUF version {version} is not supported, versions 2 and 3 are; convert the model again")


def _metadata(cursor: Cursor) -> dict[str, Any]:
    count = cursor.count("the number of keys", _LEAST_KEY_BYTES, MAX_KEYS)
    metadata = dict[str, Any]()
    for i in range(count):
        key = cursor.string(f"key {i} of {count}")
        if key in metadata:
            raise cursor.fail(f"the key '{shown(key)}' comes twice; convert the model again")
        metadata[key] = cursor.value(key)
    return metadata


def _tensor(cursor: Cursor, index: int, total: int) -> TensorEntry:
    name = cursor.string(f"the name of tensor {index} of {total}")
    where = f"tensor {shown(name)}"
    dim_count: int = cursor.number("<I", f"{where}: its number of dimensions")
    if not 1 <= dim_count <= MAX_DIMS:
        raise cursor.fail(f"{where} has {dim_count} dimensions; from 1 to {MAX_DIMS} are allowed; {DAMAGED}")
    dims = tuple(cursor.number("<Q", f"{where}: dimension {d}") for d in range(dim_count))
    type_id: int = cursor.number("<I", f"{where}: its type")
    offset: int = cursor.number("<Q", f"{where}: its offset")
    return TensorEntry(name, dims, type_id, offset)
