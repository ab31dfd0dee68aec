"""GGUF files, memory-mapped: metadata, and tensors as views of the mapping. Everything is checked before it is used."""

from __future__ import annotations

import math
import mmap
import stat
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
from .gguf_split import all_parts, check_part, check_total
from .gguf_values import DAMAGED, shown

U8 = NDArray[np.uint8]


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
    """A model in one file or several parts. Metadata and views of tensors stay valid after `close`."""

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
        """A tensor's bytes, a read-only view [nbytes] of the mapping. ValueError when the model is closed."""
        info = self.tensors[name]
        if not self._maps:
            raise ValueError(f"{self.path} is closed")
        return self._maps[info.part][info.offset : info.offset + info.nbytes]

    def expert_data(self, name: str, expert: int) -> U8:
        """The bytes of one expert of a tensor [inputs, outputs, experts]: a contiguous part of it."""
        dims = self.tensors[name].dims
        if len(dims) != 3:
            raise ValueError(f"{name} has {len(dims)} dimensions; experts are the third of three")
        experts = dims[2]
        if not 0 <= expert < experts:
            raise IndexError(f"{name} has experts 0 to {experts - 1}, not {expert}")
        data = self.data(name)
        size = len(data) // experts
        return data[expert * size : (expert + 1) * size]

    def release(self, name: str) -> None:
        """Take a tensor's bytes out of this process's memory: what is read again comes from the file again."""
        info = self.tensors[name]
        if self._maps and hasattr(mmap, "MADV_DONTNEED"):
            base = self._maps[info.part].base
            mapping = base.obj if isinstance(base, memoryview) else base
            start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            if isinstance(mapping, mmap.mmap):
                mapping.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)

    def close(self) -> None:
        """Let the files go: each is unmapped as soon as no view of its tensors is left."""
        self._maps = ()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_gguf(path: Path) -> GGUFFile:
    """Open a model by its only file or its first part. GGUFError says which file, tensor and numbers are wrong."""
    header, mapped = _open_part(path)
    paths = all_parts(path, header.metadata)
    maps, tensors = [mapped], dict[str, TensorInfo]()
    _add_tensors(tensors, header, path, 0, len(mapped))
    for index, other in enumerate(paths[1:], 1):
        other_header, mapped = _open_part(other)
        check_part(other, other_header.metadata, index + 1, len(paths))
        maps.append(mapped)
        _add_tensors(tensors, other_header, other, index, len(mapped))
    if len(paths) > 1:
        check_total(path, header.metadata, len(paths), len(tensors))
    return GGUFFile(paths, header.metadata, tensors, tuple(maps))


def _open_part(path: Path) -> tuple[Header, U8]:
    mapping = _mapped(path)
    return read_header(memoryview(mapping), str(path)), np.frombuffer(mapping, np.uint8)


def _mapped(path: Path) -> mmap.mmap:
    try:
        found = path.stat()
        # Asked before it is opened: to open a pipe would wait for its other end.
        if not stat.S_ISREG(found.st_mode):
            what = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise GGUFError(f"{path}: is {what}; name a .gguf file")
        if not found.st_size:
            raise GGUFError(f"{path}: the file is empty; get it again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, OverflowError) as error:
        # Not an OSError: a path that no file can have, a file that became empty or is too large for the address space.
        raise GGUFError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _add_tensors(tensors: dict[str, TensorInfo], header: Header, path: Path, part: int, size: int) -> None:
    found = [_info(entry, header, path, part, size) for entry in header.tensors]
    for info in found:
        if info.name in tensors:
            raise GGUFError(f"{path}: the tensor {shown(info.name)} comes twice; convert the model again")
        tensors[info.name] = info
    end, before = 0, ""
    for info in sorted(found, key=lambda i: i.offset):
        if info.offset < end:
            raise GGUFError(
                f"{path}: the tensors {shown(before)} and {shown(info.name)} overlap: the one ends at {end} and the "
                f"other begins at {info.offset}; convert the model again"
            )
        end, before = info.offset + info.nbytes, info.name


def _info(entry: TensorEntry, header: Header, path: Path, part: int, size: int) -> TensorInfo:
    where = f"{path}: tensor {shown(entry.name)}"
    try:
        kind = GGMLType(entry.type_id)
    except ValueError:
        name = REFUSED.get(entry.type_id, "unknown to us")
        known = ", ".join(t.name for t in GGMLType)
        raise GGUFError(
            f"{where} has type {entry.type_id} ({name}), which is not supported; get the model in one of {known}"
        ) from None
    if 0 in entry.dims:
        raise GGUFError(f"{where} has dimensions {' x '.join(map(str, entry.dims))}; none may be 0; {DAMAGED}")
    try:
        nbytes = math.prod(entry.dims[1:]) * row_bytes(kind, entry.dims[0])
    except ValueError as error:
        raise GGUFError(f"{where}: {error}; convert the model again") from None
    if entry.offset % header.alignment:
        raise GGUFError(
            f"{where} begins at {entry.offset}, no multiple of the alignment {header.alignment}; "
            "convert the model again"
        )
    start = header.data_start + entry.offset
    if start + nbytes > size:
        raise GGUFError(f"{where}: its {nbytes} bytes at {start} reach past the end of the file at {size}; {DAMAGED}")
    return TensorInfo(entry.name, kind, entry.dims, start, nbytes, part)
