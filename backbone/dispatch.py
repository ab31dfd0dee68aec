"""In-flight expert calls as a pure state machine.

Rule 1: every transition is here. Rule 2: no sockets, no clock, no arrays: time arrives in events, actions go out.
Rule 3: whatever happens, each (row, slot) of a ticket is filled exactly once: by a worker's rows, or computed locally
when its worker was lost, answered garbage, or was too late.

A ticket is one layer's `experts` for a batch of rows; it is cut into calls, one for each worker that holds some of the
chosen experts. The shell carries the actions out: sends, local computation, telling about a lost worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class Pair:
    """One row of one expert: row t of the batch goes through `expert` and fills slot k."""

    row: int
    slot: int
    expert: int


@dataclass(frozen=True, slots=True)
class Call:
    """What one worker is asked for of a ticket."""

    seq: int
    ticket: int
    worker: str
    layer: int
    epoch: int
    pairs: tuple[Pair, ...]
    width: int  #: values that a row of the answer has
    deadline_s: float


# ---- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send the call to its worker, without blocking."""

    call: Call


@dataclass(frozen=True, slots=True)
class Fill:
    """The rows that came are the call's: put them in place."""

    call: Call


@dataclass(frozen=True, slots=True)
class ComputeLocally:
    """Nobody else does these pairs: compute them here, then report `Computed`."""

    ticket: int
    layer: int
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is not used any more."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """An answer that nobody waits for: too late, twice, or never asked for."""

    worker: str
    reason: str


Action = Send | Fill | ComputeLocally | Lost | Dropped


class Standing(Enum):
    """Whether a worker gets calls."""

    SERVING = "serving"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """A worker as the dispatcher sees it."""

    name: str
    epoch: int
    holds: Mapping[int, Collection[int]]  #: layer to expert ids
    standing: Standing = Standing.SERVING
    in_flight: set[int] = field(default_factory=set)


class Dispatcher:
    """Events in, actions out. Every method is an event; each returns what the shell has to do, in order."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._members: dict[str, Member] = {}
        self._calls: dict[int, Call] = {}
        self._open: dict[int, int] = {}  #: ticket to pairs that are not filled yet
        self._seq = 0

    # ---- questions

    def done(self, ticket: int) -> bool:
        """Whether every pair of a ticket is filled."""
        return self._open.get(ticket, 0) == 0

    def next_deadline(self) -> float | None:
        """When the first call in flight is late."""
        return min((call.deadline_s for call in self._calls.values()), default=None)

    def serving(self) -> tuple[str, ...]:
        """Names of workers that get calls."""
        return tuple(m.name for m in self._members.values() if m.standing is Standing.SERVING)

    def idle(self) -> bool:
        """Whether no call is in flight."""
        return not self._calls

    # ---- events

    def joined(self, name: str, epoch: int, holds: Mapping[int, Collection[int]]) -> list[Action]:
        """A worker has loaded what it was assigned."""
        self._members[name] = Member(name, epoch, {layer: frozenset(ids) for layer, ids in holds.items()})
        return []

    def issued(self, ticket: int, layer: int, ids: Sequence[Sequence[int]], width: int, now_s: float) -> list[Action]:
        """A layer asks for the experts ids[row][slot], each to give `width` values."""
        by_worker: dict[str | None, list[Pair]] = {}
        load: dict[str, int] = {}
        for row, chosen in enumerate(ids):
            for slot, expert in enumerate(chosen):
                holder = self._holder(layer, expert, load)
                if holder is not None:
                    load[holder] = load.get(holder, 0) + 1
                by_worker.setdefault(holder, []).append(Pair(row, slot, expert))
        self._open[ticket] = sum(map(len, by_worker.values()))
        actions = list[Action]()
        for worker, pairs in by_worker.items():
            if worker is None:
                actions.append(ComputeLocally(ticket, layer, tuple(pairs)))
                continue
            self._seq += 1
            member = self._members[worker]
            deadline_s = now_s + self._deadline_s
            call = Call(self._seq, ticket, worker, layer, member.epoch, tuple(pairs), width, deadline_s)
            self._calls[call.seq] = call
            member.in_flight.add(call.seq)
            actions.append(Send(call))
        # What is sent first runs while the rest is computed here.
        return sorted(actions, key=lambda a: isinstance(a, ComputeLocally))

    def answered(self, worker: str, seq: int, epoch: int, shape: tuple[int, ...], *, is_finite: bool) -> list[Action]:
        """Rows came. They count only from the worker that was asked, once, of the right epoch and shape, finite."""
        call = self._calls.get(seq)
        if call is None or call.worker != worker:
            return [Dropped(worker, f"rows of call {seq}, which is not in flight there")]
        if epoch != call.epoch:
            return self.lost(worker, f"call {seq}: rows of epoch {epoch}, asked of epoch {call.epoch}")
        if shape != (len(call.pairs), call.width):
            return self.lost(worker, f"call {seq}: rows {shape}, asked for {(len(call.pairs), call.width)}")
        if not is_finite:
            return self.lost(worker, f"call {seq}: rows that are not finite")
        self._finish(call)
        self._open[call.ticket] -= len(call.pairs)
        return [Fill(call)]

    def failed(self, worker: str, seq: int, reason: str) -> list[Action]:
        """The worker says that it cannot do a call. It is believed, and not asked again."""
        return self.lost(worker, f"call {seq}: {reason}")

    def computed(self, ticket: int, pairs: int) -> list[Action]:
        """Pairs were computed locally."""
        self._open[ticket] -= pairs
        return []

    def lost(self, worker: str, reason: str) -> list[Action]:
        """A worker died, hangs, or cannot be trusted: its calls are computed locally."""
        member = self._members.get(worker)
        if member is None or member.standing is Standing.LOST:
            return []
        member.standing = Standing.LOST
        orphans = [self._calls[seq] for seq in sorted(member.in_flight)]
        for call in orphans:
            self._finish(call)
        return [Lost(worker, reason), *(ComputeLocally(c.ticket, c.layer, c.pairs) for c in orphans)]

    def ticked(self, now_s: float) -> list[Action]:
        """Time has passed: whoever has a late call is lost."""
        late = sorted({c.worker for c in self._calls.values() if c.deadline_s <= now_s})
        return [action for worker in late for action in self.lost(worker, "no answer within its deadline")]

    def forgotten(self, ticket: int) -> list[Action]:
        """The ticket's rows were taken, or nobody wants them any more. Answers still to come are dropped."""
        self._open.pop(ticket, None)
        for call in [c for c in self._calls.values() if c.ticket == ticket]:
            self._finish(call)
        return []

    # ---- inside

    def _holder(self, layer: int, expert: int, load: Mapping[str, int]) -> str | None:
        """The serving holder with the least to do in this layer; of equals the first that joined."""
        holders = [
            m.name
            for m in self._members.values()
            if m.standing is Standing.SERVING and expert in m.holds.get(layer, ())
        ]
        return min(holders, key=lambda name: load.get(name, 0), default=None)

    def _finish(self, call: Call) -> None:
        del self._calls[call.seq]
        self._members[call.worker].in_flight.discard(call.seq)
