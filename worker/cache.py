"""Slices on disk: a file for each, named by its sha256, in a folder that several workers of a machine share.

Nothing is trusted for its name: whoever opens a slice hashes it. A slice on its way is a `.part` file that its writer
has locked; what a killed worker left of one is taken up again. Files appear by rename and may vanish at any time:
a mapping outlives its file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .mapping import U8, mapped

DEFAULT_BYTES = 20 << 30
FREE_SHARE = 0.8  #: of the disk's free space that the cache may take at most, without being told a size
LOW_SHARE = 0.9  #: to which it is emptied when it is full, so that this is not done for each slice
_BLOCK_BYTES = 1 << 20
_NAME = re.compile(r"([0-9a-f]{64})((?:\.\d+)?\.part)?")


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where slices are kept."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/nonexistent") / ".cache")
    return Path(home) / "expertswarm" / "slices"


def default_bytes(folder: Path) -> int:
    """The size of a cache that was given none: a fixed one, or what the disk can spare."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    held = sum(entry.nbytes for entry in listing(folder))
    return min(DEFAULT_BYTES, int((shutil.disk_usage(there).free + held) * FREE_SHARE))


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache."""

    name: str
    sha256: bytes
    is_part: bool
    nbytes: int
    used_s: float  #: when it was last used, unix seconds


def listing(folder: Path) -> list[Entry]:
    """The slices of a folder, the one used last first. What else lies there is none of ours."""
    found = list[Entry]()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        for file in files:
            if (match := _NAME.fullmatch(file.name)) is not None:
                with contextlib.suppress(OSError):  # gone meanwhile
                    state = file.stat(follow_symlinks=False)
                    sha256, is_part = bytes.fromhex(match[1]), match[2] is not None
                    found.append(Entry(file.name, sha256, is_part, state.st_size, state.st_mtime))
    return sorted(found, key=lambda entry: entry.used_s, reverse=True)


def prune(folder: Path, to_bytes: int, keep: Collection[bytes] = ()) -> list[Entry]:
    """Remove what was not used for longest until so much is left; neither `keep` nor what somebody is writing."""
    entries = listing(folder)
    held, removed = sum(entry.nbytes for entry in entries), list[Entry]()
    for entry in reversed(entries):
        if held <= to_bytes:
            break
        if entry.sha256 not in keep and _remove(folder / entry.name, entry.is_part):
            held -= entry.nbytes
            removed.append(entry)
    return removed


def _remove(path: Path, is_part: bool) -> bool:
    with contextlib.suppress(OSError):
        if is_part:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        else:
            path.unlink()
        return True
    return False


class Part:
    """A slice on its way to the disk: its first `done` bytes are there. One thread at a time writes."""

    def __init__(self, path: Path, final: Path, file: BinaryIO, done: int) -> None:
        self._path, self._final, self._file = path, final, file
        self.done = done

    def blocks(self) -> Iterator[bytes]:
        """What is there, to be hashed. OSError when it cannot be read."""
        self._file.seek(0)
        left = self.done
        while left and (block := self._file.read(min(left, _BLOCK_BYTES))):
            left -= len(block)
            yield block
        if left:
            raise OSError(5, "a slice's beginning is gone", str(self._path))

    def write(self, data: memoryview) -> None:
        """Put bytes behind those that are there. OSError when the disk is full."""
        while data:
            data = data[self._file.write(data) :]

    def finish(self) -> U8:
        """The whole slice, whose sha256 is right, in its place. OSError when it cannot be put there."""
        self._path.replace(self._final)
        self._file.close()
        return mapped(self._final)

    def leave(self) -> None:
        """Leave what is there to whoever comes next."""
        self._file.close()

    def discard(self) -> None:
        """Remove what is there: it is wrong."""
        self._path.unlink(missing_ok=True)
        self._file.close()


class SliceCache:
    """A folder of at most `most_bytes`. Problems with the disk never stop a worker: it then goes without."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._used = set[bytes]()  #: by this process
        self._held: int | None = None  #: bytes when it was last looked at, and what was added since
        self._coming: dict[bytes, int] = {}  #: whole sizes of what this process has begun to write

    def newest(self) -> Iterator[bytes]:
        """Whole slices, the one used last first."""
        return (entry.sha256 for entry in listing(self.folder) if not entry.is_part)

    def here(self, sha256: bytes, size: int) -> int:
        """Bytes of a slice that are there: all, the beginning, or none."""
        path = self.folder / sha256.hex()
        with contextlib.suppress(OSError):
            return size if path.stat().st_size == size else 0
        with contextlib.suppress(OSError):
            return min(path.with_suffix(".part").stat().st_size, size)
        return 0

    def open(self, sha256: bytes, size: int) -> U8 | None:
        """A whole slice, to be hashed; None when it is not there."""
        path = self.folder / sha256.hex()
        with contextlib.suppress(OSError):
            data = mapped(path)
            if len(data) == size:
                os.utime(path)
                self._used.add(sha256)
                return data
        return None

    def part(self, sha256: bytes, size: int, done: int) -> Part | None:
        """Where to write a slice whose first `done` bytes are there. None where they are not, or there is no room.

        OSError when the folder cannot be used.
        """
        if not self._has_room(size - done):
            return None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        final = self.folder / sha256.hex()
        path = final.with_suffix(".part")
        while True:
            file = path.open("a+b", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another worker writes the same slice: each its own, the last rename stays
                file.close()
                path = final.with_name(f"{sha256.hex()}.{os.getpid()}.part")
                path.unlink(missing_ok=True)
                continue
            if _is_at(path, file):
                break
            file.close()  # whoever held the lock has put it into its place
        if os.fstat(file.fileno()).st_size < done:
            file.close()
            return None
        file.truncate(done)
        self._used.add(sha256)
        self._held = (self._held or 0) + size - done
        self._coming[sha256] = size
        return Part(path, final, file, done)

    def remove(self, sha256: bytes) -> None:
        """Remove a slice that turned out wrong."""
        self._used.discard(sha256)
        with contextlib.suppress(OSError):
            (self.folder / sha256.hex()).unlink()

    def release(self, kept: Collection[bytes]) -> None:
        """This process uses these slices and no others."""
        self._used.intersection_update(kept)

    def _has_room(self, size: int) -> bool:
        if self._held is None:
            self._held = self._counted()
        if self._held + size > self.most_bytes:
            prune(self.folder, max(0, int(self.most_bytes * LOW_SHARE) - size), self._used)
            self._held = self._counted()
        return self._held + size <= self.most_bytes

    def _counted(self) -> int:
        """Bytes in the folder, slices on their way with what they will have."""
        entries = listing(self.folder)
        self._coming = {e.sha256: self._coming[e.sha256] for e in entries if e.is_part and e.sha256 in self._coming}
        return sum(self._coming.get(e.sha256, e.nbytes) if e.is_part else e.nbytes for e in entries)


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether a path still names an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False
