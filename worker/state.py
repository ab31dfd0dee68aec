"""The worker's life as a pure state machine.

Rule 1: every decision is here. Rule 2: no sockets, no clock, no arrays: time and what became of an action arrive as
events. Rule 3: an assignment is all or nothing: its layer is held once every slice is here with the right sha256.

    connecting -> serving -> ended        and each layer: fetching -> loading -> held, beside the calls

Legend: a slice is one expert's matrix or bias, named by its sha256; it is fetched in chunks, in order, a few in flight,
unless it lies on this machine, where it is checked. A session is what a joined worker has with one backbone process:
when another one begins, layers are stale: not assigned any more, but their slices may well be asked for again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from protocol.messages import (
    Assign,
    Drain,
    Failed,
    Fetch,
    Goodbye,
    Ready,
    Refused,
    Run,
    Welcome,
)
from protocol.schema import one_line

from .actions import (
    Action,
    Check,
    Compute,
    End,
    Ignored,
    Keep,
    Load,
    Progress,
    Send,
    SendAttach,
    SendFetch,
    SendHello,
    Store,
)
from .chunk_size import ChunkSize

WELCOME_TIMEOUT_S = 60.0
UNSTORED_BYTES = 16 << 20  #: that may have come and not yet be written and hashed; then no more is asked for
MOST_EPOCHS = 1024  #: of a layer's assignments that a call may be of
MOST_ATTEMPTS = 2  #: to fetch a slice whose sha256 came out wrong


class Phase(Enum):
    """Where in its life a worker is."""

    CONNECTING = "connecting"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(slots=True)
class _Layer:
    """What a layer was last assigned. What it was assigned before serves calls until that is here."""

    assign: Assign
    nbytes: int
    missing: set[bytes]
    held: Assign | None = None  #: whose experts are held
    held_nbytes: int = 0
    epochs: set[int] = field(default_factory=set)  #: that a call may be of: each was held, one after the other
    is_stale: bool = False  #: of an earlier session

    @property
    def is_held(self) -> bool:
        """Whether the experts that were assigned last are held."""
        return self.held is self.assign

    def back_to_held(self) -> None:
        """What was held before goes on serving: the last assignment is given up."""
        if self.held is not None:
            self.assign, self.nbytes, self.missing = self.held, self.held_nbytes, set()


@dataclass(frozen=True, slots=True)
class _Rest:
    """What is still to be asked for of a slice. Its chunks are not made before: a backbone may claim any size."""

    sha256: bytes
    offset: int
    size: int


@dataclass(slots=True)
class WorkerState:
    """Events in, actions out. `memory_bytes` bounds the experts held (0: no bound)."""

    memory_bytes: int = 0
    has_file: bool = False
    phase: Phase = Phase.CONNECTING
    name: str = ""
    _is_attached: bool = False
    _give_up_s: float | None = None
    _layers: dict[int, _Layer] = field(default_factory=dict)
    _sizes: dict[bytes, int] = field(default_factory=dict)  #: of slices that are on their way
    _checking: set[bytes] = field(default_factory=set)  #: of those, the ones that lie on this machine
    _here: set[bytes] = field(default_factory=set)
    _attempts: dict[bytes, int] = field(default_factory=dict)
    _wanted: OrderedDict[bytes, _Rest] = field(default_factory=OrderedDict)  #: by sha256, the next one first
    _in_flight: deque[Fetch] = field(default_factory=deque)
    _chunk: ChunkSize = field(default_factory=ChunkSize)
    _unstored: int = 0
    _bytes_done: int = 0
    _bytes_total: int = 0

    # ---- questions

    def cached(self) -> tuple[bytes, ...]:
        """Slices that are here, for HELLO."""
        return tuple(sorted(self._here))

    def experts_held(self) -> int | None:
        """Experts that are held, of all layers; None while some are on their way."""
        layers = [layer for layer in self._layers.values() if not layer.is_stale]
        if not all(layer.is_held for layer in layers):
            return None
        return sum(len({piece.expert for piece in layer.assign.slices}) for layer in layers)

    # ---- events: connections

    def session_began(self) -> list[Action]:
        """There will be new connections, perhaps to another process: whatever was promised to the last one is void."""
        self.phase, self._give_up_s, self._is_attached = Phase.CONNECTING, None, False
        self._wanted.clear()
        self._in_flight.clear()
        self._sizes.clear()
        self._checking.clear()
        self._attempts.clear()
        self._bytes_done = self._bytes_total = 0
        self._layers = {i: layer for i, layer in self._layers.items() if layer.held is not None}
        for layer in self._layers.values():
            layer.back_to_held()
            layer.is_stale = True
        return []

    def calls_connected(self) -> list[Action]:
        """The connection for calls is up, for the first time or again: the backbone must be told who this is."""
        return [SendHello()]

    def weights_connected(self) -> list[Action]:
        """The connection for weights is up. What was asked for over an earlier one may not come: ask again."""
        self._is_attached, self._chunk = True, ChunkSize()
        return [SendAttach(), *map(SendFetch, self._in_flight), *self._fetch()]

    def ticked(self, now_s: float) -> list[Action]:
        """Time has passed."""
        if self.phase is not Phase.CONNECTING:
            return []
        if self._give_up_s is None:
            self._give_up_s = now_s + WELCOME_TIMEOUT_S
        return (
            self._end(f"no answer from the backbone within {WELCOME_TIMEOUT_S:g} s", may_retry=True)
            if now_s > self._give_up_s
            else []
        )

    def welcomed(self, message: Welcome) -> list[Action]:
        """The backbone accepts the worker."""
        self.phase, self.name = Phase.SERVING, message.name
        return []

    def refused(self, message: Refused) -> list[Action]:
        """The backbone does not."""
        return self._end(f"refused by the backbone: {message.reason}")

    def drained(self, _: Drain) -> list[Action]:
        """The backbone lets the worker go. Calls are answered one by one, so that none is under way."""
        return [Send(Goodbye("drained")), *self._end("")]

    def stopped(self) -> list[Action]:
        """Somebody on this machine ends the worker."""
        return [Send(Goodbye("stopped")), *self._end("")]

    # ---- events: experts

    def assigned(self, assign: Assign, sizes: Sequence[int], here: Sequence[int] = ()) -> list[Action]:
        """Experts to hold, with the bytes of each of their slices, and how many of these lie on this machine."""
        if not assign.slices:  # the layer is others' from now on
            self._layers.pop(assign.layer, None)
            return [Keep(self._kept(), assign.layer), Send(Ready(assign.epoch, assign.layer))]
        nbytes, others = sum(sizes), self._bytes_beside(assign.layer)
        before = self._layers.get(assign.layer)
        dropped = list[int]()
        if self.memory_bytes and nbytes + others > self.memory_bytes:
            dropped = self._drop_stale()
            others = self._bytes_beside(assign.layer)
        lets_go = [Keep(self._kept(), i) for i in dropped]
        if self.memory_bytes and nbytes + others > self.memory_bytes:
            return [
                *lets_go,
                *self._not_assigned(
                    assign,
                    f"layer {assign.layer} needs {nbytes} bytes beside {others} assigned before; this worker's memory "
                    f"is {self.memory_bytes} bytes",
                ),
            ]
        if not self.has_file and not all(piece.sha256 for piece in assign.slices):
            return self._not_assigned(assign, f"layer {assign.layer}: slices without a sha256, and no model file here")
        places = zip(assign.slices, sizes, here or [0] * len(sizes), strict=True)
        named = {piece.sha256: (piece, size, there) for piece, size, there in places if piece.sha256}
        layer = self._layers[assign.layer] = _Layer(assign, nbytes, named.keys() - self._here)
        if before is not None and before.held is not None and not before.is_stale and self._fits_beside(before, assign):
            layer.held, layer.held_nbytes, layer.epochs = before.held, before.held_nbytes, before.epochs
            lets_go.append(Keep(self._kept()))
        else:
            lets_go.append(Keep(self._kept(), assign.layer))
        checks = list[Action]()
        for sha256, (piece, size, there) in named.items():
            if sha256 in self._here or sha256 in self._sizes:
                continue
            if there == size:
                self._sizes[sha256] = size
                self._checking.add(sha256)
                checks.append(Check(piece, size))
            else:
                self._want(sha256, size, there)
        return [*lets_go, *checks, *(self._fetch() if layer.missing else [Load(assign)])]

    def chunk_came(self, sha256: bytes, offset: int, length: int, now_s: float) -> list[Action]:
        """A chunk came. They come in the order in which they were asked for."""
        first = self._in_flight[0] if self._in_flight else None
        if first is None or (first.sha256, first.offset, first.length) != (sha256, offset, length):
            return [Ignored(f"{length} bytes at {offset} of slice {sha256.hex()[:12]}, which was not asked for now")]
        self._in_flight.popleft()
        self._chunk.came(length, now_s)
        self._bytes_done += length
        size = self._sizes.get(sha256)
        if size is None:
            return [Ignored(f"a chunk of slice {sha256.hex()[:12]}, which was found here meanwhile"), *self._fetch()]
        self._unstored += length
        store = Store(sha256, size, offset)
        return [store, Progress(self._bytes_done, self._bytes_total), *self._fetch()]

    def chunk_stored(self, length: int) -> list[Action]:
        """A chunk was written and hashed."""
        self._unstored -= length
        return self._fetch()

    def slice_right(self, sha256: bytes) -> list[Action]:
        """A slice is whole and has its sha256."""
        if self._sizes.pop(sha256, None) is None:
            return []  # of an earlier session
        if sha256 in self._checking:
            self._checking.discard(sha256)
        elif self._is_coming(sha256):
            self._wanted.pop(sha256, None)
        self._attempts.pop(sha256, None)
        self._here.add(sha256)
        waiting = [layer for layer in self._layers.values() if sha256 in layer.missing]
        for layer in waiting:
            layer.missing.discard(sha256)
        return [Load(layer.assign) for layer in waiting if not layer.missing]

    def slice_wrong(self, sha256: bytes) -> list[Action]:
        """A slice is whole and has another sha256: fetch it once more, then give its layers up."""
        if sha256 not in self._sizes or (sha256 not in self._checking and self._is_coming(sha256)):
            return []  # of an earlier session
        size = self._sizes.pop(sha256)
        if sha256 in self._checking:  # what lay here is not what it seemed
            self._checking.discard(sha256)
            self._want(sha256, size)
            return self._fetch()
        attempts = self._attempts[sha256] = self._attempts.get(sha256, 1) + 1
        if attempts <= MOST_ATTEMPTS:
            self._bytes_done -= size
            self._bytes_total -= size
            self._want(sha256, size)
            return self._fetch()
        del self._attempts[sha256]
        given_up = [layer.assign for layer in self._layers.values() if sha256 in layer.missing]
        reason = f"slice {sha256.hex()[:12]} arrived {MOST_ATTEMPTS} times with another sha256"
        return [action for assign in given_up for action in self._not_assigned(assign, reason)]

    def loaded(self, assign: Assign) -> list[Action]:
        """The experts of an assignment are held."""
        layer = self._layers.get(assign.layer)
        if layer is None or layer.is_stale or layer.assign.epoch != assign.epoch:
            return []
        is_other = layer.held is not None
        layer.held, layer.held_nbytes = assign, layer.nbytes
        layer.epochs.add(assign.epoch)
        if len(layer.epochs) > MOST_EPOCHS:
            layer.epochs.remove(min(layer.epochs))
        lets_go = [Keep(self._kept())] if is_other else []  # of what the one before had and this one has not
        return [*lets_go, Send(Ready(assign.epoch, assign.layer))]

    def not_loaded(self, assign: Assign, reason: str) -> list[Action]:
        """They do not make experts."""
        return self._not_assigned(assign, reason)

    # ---- events: calls

    def asked(self, run: Run) -> list[Action]:
        """A call: only for experts held, of an epoch that they are or were of in this session."""
        layer = self._layers.get(run.layer)
        if layer is None or layer.held is None or layer.is_stale:
            reason = f"no experts of layer {run.layer} are held here"
        elif run.epoch not in layer.epochs:
            reason = f"layer {run.layer} is of epoch {layer.held.epoch} here, asked for is epoch {run.epoch}"
        else:
            # Calls come after the last assignment: what no backbone has asked for again is not needed.
            dropped = self._drop_stale()
            kept = self._kept() if dropped else frozenset[bytes]()
            return [*(Keep(kept, i) for i in dropped), Compute(run)]
        return [Send(Failed(run.seq, run.epoch, reason))]

    # ---- inside

    def _end(self, reason: str, *, may_retry: bool = False) -> list[Action]:
        self.phase = Phase.ENDED
        return [End(reason, may_retry)]

    def _bytes_beside(self, layer: int) -> int:
        return sum(other.nbytes for i, other in self._layers.items() if i != layer)

    def _fits_beside(self, before: _Layer, assign: Assign) -> bool:
        """Whether a layer's experts may stay until those of its next assignment are here.

        A slice's size is not known any more by then: what is only in the earlier one counts as the whole of it.
        """
        old, new = _slices(before.held), _slices(assign)
        if not self.memory_bytes or self.has_file or old <= new or new <= old:
            return True
        return (
            self._bytes_beside(assign.layer) + self._layers[assign.layer].nbytes + before.held_nbytes
            <= self.memory_bytes
        )

    def _kept(self) -> frozenset[bytes]:
        """Slices of any layer, or on their way. What else is here is not, once this is asked."""
        kept = frozenset(self._sizes).union(
            *(_slices(assign) for layer in self._layers.values() for assign in (layer.assign, layer.held))
        )
        self._here &= kept
        return kept

    def _drop_stale(self) -> list[int]:
        dropped = [i for i, layer in self._layers.items() if layer.is_stale]
        for i in dropped:
            del self._layers[i]
        return dropped

    def _is_coming(self, sha256: bytes) -> bool:
        return sha256 in self._wanted or any(fetch.sha256 == sha256 for fetch in self._in_flight)

    def _not_assigned(self, assign: Assign, reason: str) -> list[Action]:
        layer = self._layers.get(assign.layer)
        if layer is not None and not layer.is_stale and layer.assign.epoch == assign.epoch:
            layer.back_to_held()
            if layer.held is None:
                del self._layers[assign.layer]
        return [Send(Failed(0, assign.epoch, one_line(reason)))]

    def _want(self, sha256: bytes, size: int, there: int = 0) -> None:
        """Fetch a slice, or what is missing behind the bytes that lie here."""
        self._sizes[sha256] = size
        self._bytes_total += size
        self._bytes_done += there
        if there < size:
            self._wanted[sha256] = _Rest(sha256, there, size)

    def _fetch(self) -> list[Action]:
        actions = list[Action]()
        while (
            self._is_attached
            and self._wanted
            and len(self._in_flight) < self._chunk.chunks
            and self._unstored < UNSTORED_BYTES
        ):
            rest = next(iter(self._wanted.values()))
            message = Fetch(rest.sha256, rest.offset, min(self._chunk.nbytes, rest.size - rest.offset))
            if (end := rest.offset + message.length) < rest.size:
                self._wanted[rest.sha256] = _Rest(rest.sha256, end, rest.size)
            else:
                del self._wanted[rest.sha256]
            self._in_flight.append(message)
            actions.append(SendFetch(message))
        return actions


def _slices(assign: Assign | None) -> frozenset[bytes]:
    return frozenset(piece.sha256 for piece in assign.slices) if assign is not None else frozenset()
