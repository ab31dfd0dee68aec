"""GGUF files, memory-mapped: metadata, and tensors as views of the mapping. Everything is checked before it is used."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import GGUFError
from .formats import REFUSED, GGMLType, row_bytes
from .gguf_header import Header, TensorEntry, read_header

U8 = NDArray[np.uint8]
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and what it holds. `dims` is in GGUF order: the length of a row first."""

    name: str
    type: GGMLType
    dims: tuple[int, ...]
    offset: int  #: bytes from the beginning of its file
    nbytes: int
    part: int  #: index in the model's files


class GGUFFile:
    """A model in one file or several parts. Views of tensors stay valid after `close`, which drops our own hold."""

    def __init__(
        self, paths: tuple[Path, ...], metadata: dict[str, Any], tensors: dict[str, TensorInfo], maps: tuple[U8, ...]
    ) -> None:
        self.paths = paths
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._maps = maps

    @property
    def path(self) -> Path:
        """The only file, or the first part."""
        return self.paths[0]

    def data(self, name: str) -> U8:
        """A tensor's bytes, a read-only view [nbytes] of the mapping."""
        info = self.tensors[name]
        return self._maps[info.part][info.offset : info.offset + info.nbytes]

    def expert_data(self, name: str, expert: int) -> U8:
        """The bytes of one expert of a tensor [inputs, outputs, experts]: a contiguous part of it."""
        experts = self.tensors[name].dims[2]
        if not 0 <= expert < experts:
            raise IndexError(f"{name} has experts 0 to {experts - 1}, not {expert}")
        data = self.data(name)
        size = len(data) // experts
        return data[expert * size : (expert + 1) * size]

    def close(self) -> None:
        """Let the files go as soon as no view of a tensor is left."""
        self._maps = ()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_gguf(path: Path) -> GGUFFile:
    """Open a model by its only file or its first part. GGUFError says which file, tensor and numbers are wrong."""
    header, mapped = _open_part(path)
    paths = _parts(path, header)
    maps, tensors = [mapped], dict[str, TensorInfo]()
    _add_tensors(tensors, header, path, 0, len(mapped))
    for number, other in enumerate(paths[1:], 1):
        other_header, mapped = _open_part(other)
        _check_part(other, other_header, number, len(paths))
        maps.append(mapped)
        _add_tensors(tensors, other_header, other, number, len(mapped))
    declared = header.metadata.get("split.tensors.count")
    if len(paths) > 1 and declared is not None and declared != len(tensors):
        raise GGUFError(f"{path}: its {len(paths)} parts hold {len(tensors)} tensors, and it declares {declared}")
    return GGUFFile(paths, header.metadata, tensors, tuple(maps))


def _open_part(path: Path) -> tuple[Header, U8]:
    try:
        with path.open("rb") as file:
            # An empty file cannot be mapped; it cannot be a model either.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise GGUFError(f"{path}: the file is empty") from None
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror}") from None
    return read_header(memoryview(mapping), str(path)), np.frombuffer(mapping, np.uint8)


def _split_count(header: Header, path: Path) -> int:
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool):
        raise GGUFError(f"{path}: split.count is {count!r}; a whole number is needed")
    return count


def _parts(path: Path, header: Header) -> tuple[Path, ...]:
    """All files of a model, of which this one must be the first."""
    count = _split_count(header, path)
    if count <= 1:
        return (path,)
    match = _PART.match(path.name)
    if match is None or int(match["count"]) != count:
        raise GGUFError(f"{path}: part of {count}, but its name does not end in -00001-of-{count:05}.gguf; rename it")
    paths = tuple(path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    if int(match["number"]) != 1 or header.metadata.get("split.no", 0) != 0:
        raise GGUFError(f"{path}: part {match['number']} of {count}; open the first one, {paths[0]}")
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise GGUFError(f"{path}: {len(missing)} of {count} parts are missing, the first of them {missing[0]}")
    return paths


def _check_part(path: Path, header: Header, number: int, count: int) -> None:
    found = (header.metadata.get("split.no"), _split_count(header, path))
    if found != (number, count):
        raise GGUFError(f"{path}: says to be part {found[0]} of {found[1]}, counted from 0, not {number} of {count}")


def _add_tensors(tensors: dict[str, TensorInfo], header: Header, path: Path, part: int, size: int) -> None:
    found = [_info(entry, header, path, part, size) for entry in header.tensors]
    for info in found:
        if info.name in tensors:
            raise GGUFError(f"{path}: the tensor {info.name} comes twice")
        tensors[info.name] = info
    end, before = 0, ""
    for info in sorted(found, key=lambda i: i.offset):
        if info.offset < end:
            raise GGUFError(f"{path}: the tensors {before} and {info.name} overlap at byte {info.offset}")
        end, before = info.offset + info.nbytes, info.name


def _info(entry: TensorEntry, header: Header, path: Path, part: int, size: int) -> TensorInfo:
    where = f"{path}: tensor {entry.name}"
    try:
        kind = GGMLType(entry.type_id)
    except ValueError:
        name = REFUSED.get(entry.type_id, "unknown to us")
        known = ", ".join(t.name for t in GGMLType)
        raise GGUFError(f"{where} has type {entry.type_id} ({name}), which is not supported; {known} are") from None
    if 0 in entry.dims:
        raise GGUFError(f"{where} has dimensions {' x '.join(map(str, entry.dims))}; none may be 0")
    try:
        nbytes = math.prod(entry.dims[1:]) * row_bytes(kind, entry.dims[0])
    except ValueError as error:
        raise GGUFError(f"{where}: {error}") from None
    if entry.offset % header.alignment:
        raise GGUFError(f"{where} begins at {entry.offset}, no multiple of the alignment {header.alignment}")
    start = header.data_start + entry.offset
    if start + nbytes > size:
        raise GGUFError(
            f"{where}: its {nbytes} bytes at {start} reach past the end of the file at {size}; it is damaged or cut off"
        )
    return TensorInfo(entry.name, kind, entry.dims, start, nbytes, part)
