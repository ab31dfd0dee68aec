"""A zip of arrays and JSON in numpy's .npz layout, written member by member and read as if by a stranger.

Each array is a stored (never compressed) member NAME.npy, format 1.0 (numpy.lib.format); `numpy.load` opens the whole.
A reader says what it expects, dtype and shape, and reads nothing that is not so. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

MAGIC = b"\x93NUMPY\x01\x00"
HEAD = struct.Struct("<8sH")  # magic with version, length of the header
ALIGNMENT = 64
MOST_HEADER = 1 << 12
MOST_DIRECTORY = 1 << 28  #: bytes of a zip's list of members, which is read whole
TIME = (1980, 1, 1, 0, 0, 0)  #: of every member: equal content is equal bytes
END = struct.Struct("<4s4H2LH")  # end of central directory, PKWARE APPNOTE 4.3.16
END_64 = struct.Struct("<4sQ2H2L4Q")  # its zip64 form, 4.3.14
LOCATOR = struct.Struct("<4sLQL")  # where that is, 4.3.15
BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError, OverflowError)

Shape = tuple[int, ...]


def _header(dtype: str, shape: Shape) -> bytes:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()


class ArchiveWriter:
    """Leaves a whole file at the end of the block, or none."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.{os.getpid()}.part")

    def __enter__(self) -> ArchiveWriter:
        try:
            self._zip = zipfile.ZipFile(self._part, "w", zipfile.ZIP_STORED)
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be written: {error.strerror}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._zip.close()
            if kind is None:
                self._part.replace(self._path)
        finally:
            self._part.unlink(missing_ok=True)

    def array(self, name: str, array: NDArray[Any]) -> None:
        """Write an array of little-endian numbers."""
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        header = _header(array.dtype.str, array.shape)
        header += b" " * (-(HEAD.size + len(header) + 1) % ALIGNMENT) + b"\n"
        with self._zip.open(zipfile.ZipInfo(f"{name}.npy", TIME), "w", force_zip64=True) as member:
            member.write(HEAD.pack(MAGIC, len(header)) + header)
            member.write(array.reshape(-1).view(np.uint8).data)

    def json(self, name: str, content: Any) -> None:
        """Write what JSON takes."""
        self._zip.writestr(zipfile.ZipInfo(name, TIME), json.dumps(content, allow_nan=False))


class ArchiveReader:
    """UsageError, of one line that names the place, for whatever is not as it should be."""

    def __init__(self, path: Path, place: str) -> None:
        """`place` is what errors begin with."""
        self._place = place
        try:
            file = path.open("rb")
        except OSError as error:
            raise UsageError(f"{place}: cannot be read: {error.strerror}") from None
        try:
            if _directory_bytes(file) > MOST_DIRECTORY:
                raise zipfile.BadZipFile("more members than any run has")
            self._zip = zipfile.ZipFile(file)
            file.seek(0)
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except (*BROKEN, NotImplementedError) as error:
            file.close()
            raise UsageError(f"{place}: is no whole archive ({_line(error)}); save the run anew") from None
        self._file = file

    def close(self) -> None:
        """Let go of the file."""
        self._zip.close()
        self._file.close()

    def array(self, name: str, dtype: str, shape: Shape) -> NDArray[Any]:
        """An array that has to be of this dtype ("<f4") and shape."""
        wanted = math.prod(shape) * np.dtype(dtype).itemsize
        header = HEAD.size + MOST_HEADER
        data = self._member(f"{name}.npy", wanted, wanted + header)
        magic, length = HEAD.unpack_from(data)
        start = HEAD.size + length
        found = data[HEAD.size : start].strip()
        if magic != MAGIC or found != _header(dtype, shape) or len(data) != start + wanted:
            raise self._error(f"{name}.npy", f"is no array {dtype} of shape {shape}")
        array = np.frombuffer(data, dtype, offset=start).reshape(shape)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise self._error(f"{name}.npy", "holds numbers that are not finite")
        return array

    def json(self, name: str, most_bytes: int) -> dict[str, Any]:
        """A JSON object of at most so many bytes."""
        data = self._member(name, 0, most_bytes)
        try:
            found = json.loads(data, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise self._error(name, f"is no JSON: {_line(error)}") from None
        if not isinstance(found, dict):
            raise self._error(name, "is no JSON object")
        return found

    def _member(self, name: str, least: int, most: int) -> bytes:
        try:
            info = self._zip.getinfo(name)
            if info.compress_type != zipfile.ZIP_STORED or not least <= info.file_size <= most:
                raise zipfile.BadZipFile(f"{info.file_size} bytes where {least} to {most} are due, stored as they are")
            with self._zip.open(info) as member:
                data = member.read(info.file_size)
        except KeyError:
            raise self._error(name, "is not there") from None
        except (*BROKEN, NotImplementedError) as error:
            raise self._error(name, f"is damaged: {_line(error)}") from None
        if len(data) < max(least, HEAD.size if name.endswith(".npy") else 0):
            raise self._error(name, "is cut off")
        return data

    def _error(self, name: str, what: str) -> UsageError:
        return UsageError(f"{self._place}: {name} {what}; save the run anew")


def _directory_bytes(file: BinaryIO) -> int:
    """How large a zip says that its list of members is. It has to end without a comment, as ours do."""
    size = file.seek(0, os.SEEK_END)
    if size < END.size:
        raise zipfile.BadZipFile("too short")
    file.seek(size - END.size)
    signature, *_, listed, _, comment = END.unpack(file.read(END.size))
    if signature != b"PK\5\6" or comment:
        raise zipfile.BadZipFile("cut off, or none at all")
    before = LOCATOR.size + END_64.size
    if size >= END.size + before:
        file.seek(size - END.size - before)
        signature_64, *_, listed_64, _ = END_64.unpack(file.read(END_64.size))
        if signature_64 == b"PK\6\6":
            return int(max(listed, listed_64) if listed != 0xFFFFFFFF else listed_64)
    return int(listed)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
