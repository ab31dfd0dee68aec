"""The worker's life as a pure state machine: messages in, actions out. No sockets, no clock, no arrays.

connecting -> serving -> draining -> ended
              loading and computing go on while serving: an assignment fetches its slices beside the calls
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from protocol.messages import CHUNK_BYTES, CHUNKS_IN_FLIGHT, Assign, Fetch, Ready, Refused, Welcome


class Phase(Enum):
    """Where in its life a worker is."""

    CONNECTING = "connecting"
    SERVING = "serving"
    ENDED = "ended"


# ---- actions


@dataclass(frozen=True, slots=True)
class SendFetch:
    """Ask for a chunk, over the connection for weights."""

    message: Fetch


@dataclass(frozen=True, slots=True)
class Complete:
    """Put the assignment's experts together, then send its Ready."""

    assign: Assign
    ready: Ready


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of what is being fetched is here."""

    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class End:
    """Leave; an empty reason is a wish of the backbone's."""

    reason: str


Action = SendFetch | Complete | Progress | End


@dataclass(slots=True)
class _Loading:
    """An assignment under way: slices that are not whole yet."""

    assign: Assign
    missing: set[bytes]


@dataclass(slots=True)
class WorkerState:
    """Messages and what became of chunks in; actions out."""

    phase: Phase = Phase.CONNECTING
    name: str = ""
    _loading: list[_Loading] = field(default_factory=list)
    _wanted: deque[Fetch] = field(default_factory=deque)
    _sizes: dict[bytes, int] = field(default_factory=dict)
    _in_flight: set[tuple[bytes, int]] = field(default_factory=set)
    _retried: set[bytes] = field(default_factory=set)
    _bytes_done: int = 0
    _bytes_total: int = 0

    def welcomed(self, message: Welcome) -> list[Action]:
        """The backbone accepts the worker."""
        self.phase, self.name = Phase.SERVING, message.name
        return []

    def refused(self, message: Refused) -> list[Action]:
        """The backbone does not."""
        self.phase = Phase.ENDED
        return [End(message.reason)]

    def drained(self) -> list[Action]:
        """The backbone lets the worker go. Calls are answered one by one, so nothing is under way."""
        self.phase = Phase.ENDED
        return [End("")]

    def assigned(self, assign: Assign, missing: Mapping[bytes, int]) -> list[Action]:
        """Experts to load, of which these slices are still missing (sha256 to bytes)."""
        if not missing:
            return [Complete(assign, Ready(assign.epoch, assign.layer))]
        self._loading.append(_Loading(assign, set(missing)))
        for sha256, size in missing.items():
            if sha256 not in self._sizes:
                self._want(sha256, size)
                self._bytes_total += size
        return self._fetch()

    def size_of(self, sha256: bytes, offset: int) -> int | None:
        """The bytes of the slice that a chunk belongs to; None when it was not asked for."""
        return self._sizes.get(sha256) if (sha256, offset) in self._in_flight else None

    def chunk_stored(self, sha256: bytes, offset: int, length: int, *, is_whole: bool) -> list[Action]:
        """A chunk is in its place, and perhaps the slice is whole and right."""
        self._in_flight.discard((sha256, offset))
        self._bytes_done += length
        actions: list[Action] = [Progress(self._bytes_done, self._bytes_total), *self._fetch()]
        if is_whole:
            del self._sizes[sha256]
            for loading in self._loading:
                loading.missing.discard(sha256)
            whole = [loading.assign for loading in self._loading if not loading.missing]
            self._loading = [loading for loading in self._loading if loading.missing]
            actions += [Complete(assign, Ready(assign.epoch, assign.layer)) for assign in whole]
        return actions

    def slice_wrong(self, sha256: bytes, offset: int, length: int, reason: str) -> list[Action]:
        """A slice arrived with another sha256: fetch it again, once."""
        self._in_flight.discard((sha256, offset))
        if sha256 in self._retried:
            self.phase = Phase.ENDED
            return [End(f"{reason}, twice")]
        self._retried.add(sha256)
        self._bytes_done -= self._sizes[sha256] - length
        self._want(sha256, self._sizes[sha256])
        return self._fetch()

    def _want(self, sha256: bytes, size: int) -> None:
        self._sizes[sha256] = size
        self._wanted += [
            Fetch(sha256, offset, min(CHUNK_BYTES, size - offset)) for offset in range(0, size, CHUNK_BYTES)
        ]

    def _fetch(self) -> list[Action]:
        actions = list[Action]()
        while self._wanted and len(self._in_flight) < CHUNKS_IN_FLIGHT:
            message = self._wanted.popleft()
            self._in_flight.add((message.sha256, message.offset))
            actions.append(SendFetch(message))
        return actions
