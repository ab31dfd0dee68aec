"""Slices on their way into this process, written and hashed by a thread of their own: the loop, where calls come in,
hands bytes over and is told later. Both release the GIL, so that neither stands in front of a call.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .cache import Part, SliceCache
from .errors import WorkerError
from .mapping import U8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of a chunk were put away."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Checked:
    """A slice is whole: its bytes, or None where they do not have its sha256 or could not be kept."""

    sha256: bytes
    data: U8 | None


Result = Stored | Checked


@dataclass(slots=True)
class _Arriving:
    """A slice on its way: its first `done` bytes were handed to the thread. Without a place its bytes are dropped."""

    sha256: bytes
    size: int
    done: int
    place: Part | U8 | None
    hashed: Any = field(default_factory=hashlib.sha256)
    written: int = 0  #: of a place in memory
    has_failed: bool = False


class Arrivals:
    """`wake` is readable when there are results. One thread calls; another works."""

    def __init__(self, cache: SliceCache | None = None) -> None:
        self._cache = cache
        self._arriving: dict[bytes, _Arriving] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: deque[tuple[Result, _Arriving | None]] = deque()
        self.wake, self._waker = os.pipe()
        for end in (self.wake, self._waker):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._work, name="arrivals", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of memory, or of the cache, that slices on their way take."""
        return sum(arriving.size for arriving in self._arriving.values())

    def close(self) -> None:
        """End the thread; what has arrived in parts stays in the cache."""
        self.keep(())
        self._jobs.put(None)
        self._thread.join()
        os.close(self.wake)
        os.close(self._waker)

    def results(self) -> list[Result]:
        """What was done since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 4096):
                pass
        found = list[Result]()
        while self._results:
            result, arriving = self._results.popleft()
            if isinstance(result, Checked) and arriving is not None:
                if self._arriving.get(result.sha256) is not arriving:
                    continue  # it was let go of meanwhile
                del self._arriving[result.sha256]
            found.append(result)
        return found

    def here(self, sha256: bytes) -> int:
        """Bytes that have come of a slice that is on its way."""
        arriving = self._arriving.get(sha256)
        return 0 if arriving is None else arriving.done

    def keep(self, slices: Collection[bytes]) -> None:
        """Let go of slices on their way but these."""
        for sha256 in [sha256 for sha256 in self._arriving if sha256 not in slices]:
            self._jobs.put(partial(_leave, self._arriving.pop(sha256)))

    def add(self, sha256: bytes, size: int, offset: int, data: U8) -> None:
        """Put a chunk behind the bytes that have come of a slice, or lie in the cache.

        WorkerError when it is not the next one, or there is no memory for the slice.
        """
        arriving = self._arriving.get(sha256)
        if arriving is None:
            arriving = self._arriving[sha256] = self._begin(sha256, size, offset, len(data))
        if offset != arriving.done or offset + len(data) > size:
            raise WorkerError(f"a chunk of {len(data)} bytes at {offset}; {arriving.done} of {size} are here")
        arriving.done += len(data)
        is_last = arriving.done == size
        self._jobs.put(partial(self._store, arriving, data, is_last))

    def check(self, sha256: bytes, data: U8) -> None:
        """Say whether bytes that lie here have this sha256."""
        self._jobs.put(partial(self._check, sha256, data))

    def tell(self, result: Result) -> None:
        """Give a result that needs no work, behind those that do."""
        self._jobs.put(partial(self._tell, result))

    # ---- in the caller's thread

    def _begin(self, sha256: bytes, size: int, offset: int, length: int) -> _Arriving:
        if offset + length > size:
            raise WorkerError(f"a chunk of {length} bytes at {offset}; 0 of {size} are here")
        place: Part | U8 | None = None
        try:
            place = self._cache.part(sha256, size, offset) if self._cache is not None else None
        except OSError as error:
            self._go_without(error)
        arriving = _Arriving(sha256, size, offset, place)
        if isinstance(place, Part):
            self._jobs.put(partial(self._hash_beginning, arriving, place))
        elif not offset:
            try:
                arriving.place = np.empty(size, np.uint8)
            except MemoryError:
                raise WorkerError(
                    f"no memory for a slice of {size} bytes; give this worker less with --memory"
                ) from None
        elif self._cache is None:
            raise WorkerError(f"a chunk of {length} bytes at {offset}; 0 of {size} are here")
        return arriving

    def _go_without(self, error: OSError) -> None:
        log.warning("no slices are kept on disk from now on: %s", error)
        self._cache = None

    # ---- in the thread of its own

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _tell(self, result: Result, arriving: _Arriving | None = None) -> None:
        self._results.append((result, arriving))
        with contextlib.suppress(BlockingIOError):  # full of wakes: one is enough
            os.write(self._waker, b"\0")

    def _hash_beginning(self, arriving: _Arriving, place: Part) -> None:
        try:
            for block in place.blocks():
                arriving.hashed.update(block)
        except OSError as error:
            self._fail(arriving, error)

    def _store(self, arriving: _Arriving, data: U8, is_last: bool) -> None:
        try:
            if isinstance(arriving.place, Part):
                arriving.place.write(data.data)
            elif arriving.place is not None:
                arriving.place[arriving.written : arriving.written + len(data)] = data
                arriving.written += len(data)
        except OSError as error:
            self._fail(arriving, error)
        arriving.hashed.update(data.data)
        self._tell(Stored(len(data)))
        if is_last:
            self._tell(Checked(arriving.sha256, self._finished(arriving)), arriving)

    def _finished(self, arriving: _Arriving) -> U8 | None:
        place = arriving.place
        is_right = not arriving.has_failed and arriving.hashed.digest() == arriving.sha256
        if isinstance(place, Part):
            try:
                if is_right:
                    return place.finish()
                place.discard()
            except OSError as error:
                self._fail(arriving, error)
            return None
        if place is None or not is_right:
            return None
        place.flags.writeable = False
        return place

    def _fail(self, arriving: _Arriving, error: OSError) -> None:
        arriving.has_failed = True
        self._go_without(error)

    def _check(self, sha256: bytes, data: U8) -> None:
        is_right = hashlib.sha256(data.data).digest() == sha256
        self._tell(Checked(sha256, data if is_right else None))


def _leave(arriving: _Arriving) -> None:
    if isinstance(arriving.place, Part):
        with contextlib.suppress(OSError):
            arriving.place.leave()
