"""In-flight expert calls as a pure state machine.

Rule 1: every transition is here. Rule 2: no sockets, no clock, no arrays: time arrives in events, actions go out.
Rule 3: whatever happens, each expert of a ticket is done exactly once: by a worker's rows, or computed locally when
nobody holds it. A call whose worker was lost, answered garbage, was too late, or could not be sent to is asked of other
holders first. Rule 4: which worker serves changes who computes a row, never how: only members of the class that the
class map gives an expert may do it. Where the backbone has to, and is of another class, a new map begins: the expert
is the backbone's for the rest of the run. What was asked under the earlier map and comes still counts.

A ticket is one layer's `experts` for a batch of rows; it is cut into calls, one for each worker that holds some of the
chosen experts. The shell carries the actions out: sends, places rows, computes, tells about a lost worker or a new map.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .class_map import ClassMap


@dataclass(frozen=True, slots=True)
class Call:
    """What one worker is asked for of a ticket."""

    seq: int
    ticket: int
    worker: str
    layer: int
    epoch: int
    experts: tuple[int, ...]
    pairs: int  #: rows that the answer has
    width: int  #: values that each of them has
    deadline_s: float


# ---- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send the call to its worker, without blocking; report `unsent` or `lost` when it does not go."""

    call: Call


@dataclass(frozen=True, slots=True)
class Fill:
    """The rows that came are the call's: put them in place."""

    call: Call


@dataclass(frozen=True, slots=True)
class ComputeLocally:
    """Nobody else does these experts: compute them here, then report `computed`."""

    ticket: int
    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Every row of the ticket is in place."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ReportLost:
    """A worker gets no more calls. One that is not trusted may not come back in this run either."""

    worker: str
    epoch: int  #: of what it served; it may have been assigned anew since
    reason: str
    is_trusted: bool


@dataclass(frozen=True, slots=True)
class NewMap:
    """Of these (layer, expert) no member of the class is left: they are of the backbone's class from here on."""

    experts: tuple[tuple[int, int], ...]
    before: ClassMap
    after: ClassMap


@dataclass(frozen=True, slots=True)
class ReportDropped:
    """An answer that nobody waits for: too late, twice, or never asked for."""

    worker: str
    reason: str


Action = Send | Fill | ComputeLocally | Complete | ReportLost | NewMap | ReportDropped


class Standing(Enum):
    """Whether a worker gets calls."""

    SERVING = "serving"
    STALLED = "stalled"  #: its queue is full; it serves again when it answers
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """A worker as the dispatcher sees it."""

    name: str
    numeric_class: str
    epoch: int
    holds: Mapping[int, Collection[int]]  #: layer to expert ids
    standing: Standing = Standing.SERVING
    in_flight: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Ticket:
    """What a layer asked for."""

    layer: int
    load: Mapping[int, int]  #: expert to its rows
    width: int
    left: int  #: experts that are not done yet


def choose(holders: Sequence[Member], load: Mapping[str, int]) -> Member:
    """The holder of an expert that gets its rows: the one with the least to do in this layer, of equals the first.

    All holders are of one numeric class, so that the choice cannot change a bit.
    """
    return holders[0] if len(holders) == 1 else min(holders, key=lambda member: load.get(member.name, 0))


class Dispatcher:
    """Events in, actions out. Every method but the questions is an event; each returns what to do, in order."""

    def __init__(self, class_map: ClassMap, *, deadline_s: float) -> None:
        self.class_map = class_map  #: the one in force
        self._deadline_s = deadline_s
        self._members: dict[str, Member] = {}
        self._holders: dict[tuple[int, int], list[Member]] = {}  #: (layer, expert) to those that serve it
        self._calls: dict[int, Call] = {}
        self._open: dict[int, _Ticket] = {}
        self._seq = 0

    # ---- questions

    def next_deadline(self) -> float | None:
        """When the first call in flight is late."""
        # Calls are kept in the order of their start and all have the same time: the first is the first to be late.
        return next((call.deadline_s for call in self._calls.values()), None)

    def standing(self, worker: str) -> Standing | None:
        """Whether a worker gets calls; None for one that never joined."""
        member = self._members.get(worker)
        return None if member is None else member.standing

    # ---- events: workers

    def planned(self, classes: Mapping[tuple[int, int], str]) -> None:
        """A plan was accepted, before any worker joins: it fixes the class of each (layer, expert) that it gives."""
        self.class_map = self.class_map.given(classes)

    def joined(
        self, worker: str, numeric_class: str, epoch: int, holds: Mapping[int, Collection[int]], now_s: float
    ) -> list[Action]:
        """A worker has loaded what it was assigned, for the first time or again."""
        actions = self.lost(worker, "it joined again", now_s)
        held = {layer: frozenset(ids) for layer, ids in holds.items()}
        self._members[worker] = Member(worker, numeric_class, epoch, held)
        self._find_holders()
        return actions

    def lost(self, worker: str, reason: str, now_s: float, *, is_trusted: bool = True) -> list[Action]:
        """A worker died, left or hangs: its calls go to other holders, else they are computed locally."""
        member = self._members.get(worker)
        if member is None or member.standing is Standing.LOST:
            return []
        return self._lose([member], reason, now_s, is_trusted=is_trusted)

    def garbage(self, worker: str, reason: str, now_s: float) -> list[Action]:
        """A worker sent what it must not: it is trusted no more."""
        return self.lost(worker, reason, now_s, is_trusted=False)

    # ---- events: tickets and calls

    def issued(self, ticket: int, layer: int, load: Mapping[int, int], width: int, now_s: float) -> list[Action]:
        """A layer asks for experts, each for so many rows (expert to rows), each row to have `width` values."""
        if not load:
            return [Complete(ticket)]
        self._open[ticket] = _Ticket(layer, load, width, left=len(load))
        return self._given_out(ticket, tuple(load), now_s)

    def answered(
        self, worker: str, seq: int, epoch: int, shape: tuple[int, ...], now_s: float, *, is_finite: bool
    ) -> list[Action]:
        """Rows came. They count only from the worker that was asked, once, of the right epoch and shape, finite."""
        call = self._calls.get(seq)
        if call is None or call.worker != worker:
            self._awake(worker)
            return [ReportDropped(worker, f"rows of call {seq}, which is not in flight there")]
        if epoch != call.epoch:
            return self.garbage(worker, f"call {seq}: rows of epoch {epoch}, asked of epoch {call.epoch}", now_s)
        if shape != (call.pairs, call.width):
            return self.garbage(worker, f"call {seq}: rows {shape}, asked for {(call.pairs, call.width)}", now_s)
        if not is_finite:
            return self.garbage(worker, f"call {seq}, layer {call.layer}: rows that are not finite", now_s)
        self._awake(worker)
        self._end(call)
        return [Fill(call), *self._done(call.ticket, len(call.experts))]

    def refused(self, worker: str, seq: int, reason: str, now_s: float) -> list[Action]:
        """The worker says that it cannot do a call. It is believed, and asked no more."""
        call = self._calls.get(seq)
        if call is None or call.worker != worker:
            return [ReportDropped(worker, f"refusal of call {seq}, which is not in flight there")]
        return self.lost(worker, f"it refused call {seq}, layer {call.layer}: {reason}", now_s)

    def unsent(self, seq: int, now_s: float) -> list[Action]:
        """The worker's queue is full, so that the call did not go: the worker is left alone until it answers."""
        call = self._calls.get(seq)
        if call is None:
            return []
        self._members[call.worker].standing = Standing.STALLED
        self._find_holders()
        return self._handed_over(call, now_s)

    def computed(self, ticket: int, experts: int) -> list[Action]:
        """Experts of a ticket were computed locally."""
        return self._done(ticket, experts)

    def ticked(self, now_s: float) -> list[Action]:
        """Time has passed: whoever has a late call is lost."""
        late = dict.fromkeys(call.worker for call in self._calls.values() if call.deadline_s <= now_s)
        reason = f"no answer within {self._deadline_s:g} s"
        return self._lose([self._members[worker] for worker in late], reason, now_s) if late else []

    def forgotten(self, ticket: int) -> list[Action]:
        """Nobody wants the ticket's rows any more. Answers still to come are dropped."""
        self._open.pop(ticket, None)
        for call in [c for c in self._calls.values() if c.ticket == ticket]:
            self._end(call)
        return []

    # ---- inside

    def _lose(self, members: Sequence[Member], reason: str, now_s: float, *, is_trusted: bool = True) -> list[Action]:
        """All at once, so that no call of one is asked of another that is lost as well."""
        for member in members:
            member.standing = Standing.LOST
        self._find_holders()
        actions: list[Action] = [ReportLost(member.name, member.epoch, reason, is_trusted) for member in members]
        actions += self._taken_over(
            (layer, expert)
            for member in members
            for layer, experts in member.holds.items()
            for expert in experts
            if self.class_map.of(layer, expert) == member.numeric_class
        )
        for call in [self._calls[seq] for member in members for seq in sorted(member.in_flight)]:
            actions += self._handed_over(call, now_s)
        return actions

    def _handed_over(self, call: Call, now_s: float) -> list[Action]:
        """Whoever was asked does not do a call. An answer to it that still comes is dropped."""
        self._end(call)
        return self._given_out(call.ticket, call.experts, now_s)

    def _given_out(self, ticket: int, experts: Collection[int], now_s: float) -> list[Action]:
        """Calls for some experts of a ticket to those that hold them; what nobody holds is to be computed here."""
        asked = self._open[ticket]
        layer, load, pairs = asked.layer, asked.load, dict[str, int]()
        chosen: dict[str, list[int]] = {}
        alone: list[int] = []
        busy: dict[str, int] = {}
        for call in self._calls.values():
            if call.ticket == ticket:
                busy[call.worker] = busy.get(call.worker, 0) + call.pairs
        for expert in experts:
            holders = self._holders.get((layer, expert))
            if not holders:
                alone.append(expert)
                continue
            name = choose(holders, busy).name
            rows = load[expert]
            busy[name] = busy.get(name, 0) + rows
            pairs[name] = pairs.get(name, 0) + rows
            chosen.setdefault(name, []).append(expert)
        deadline_s = now_s + self._deadline_s
        actions: list[Action] = [
            Send(self._call(ticket, name, tuple(mine), pairs[name], deadline_s)) for name, mine in chosen.items()
        ]
        if alone:  # what is sent first runs while the rest is computed here
            actions += self._taken_over((layer, expert) for expert in alone)
            actions.append(ComputeLocally(ticket, layer, tuple(alone)))
        return actions

    def _taken_over(self, experts: Iterable[tuple[int, int]]) -> list[Action]:
        """Those of some (layer, expert) that nobody serves are of the backbone's class from here on."""
        before, unserved = self.class_map, [key for key in experts if key not in self._holders]
        self.class_map = before.taken_over(unserved)
        if self.class_map is before:
            return []
        self._find_holders()
        changed = tuple(sorted({key for key in unserved if before.of(*key) != before.own}))
        return [NewMap(changed, before, self.class_map)]

    def _call(self, ticket: int, worker: str, experts: tuple[int, ...], pairs: int, deadline_s: float) -> Call:
        self._seq += 1
        asked, member = self._open[ticket], self._members[worker]
        call = Call(self._seq, ticket, worker, asked.layer, member.epoch, experts, pairs, asked.width, deadline_s)
        self._calls[call.seq] = call
        member.in_flight.add(call.seq)
        return call

    def _end(self, call: Call) -> None:
        del self._calls[call.seq]
        self._members[call.worker].in_flight.discard(call.seq)

    def _done(self, ticket: int, experts: int) -> list[Action]:
        asked = self._open.get(ticket)
        if asked is None:
            return []
        asked.left -= experts
        if asked.left > 0:
            return []
        del self._open[ticket]
        return [Complete(ticket)]

    def _awake(self, worker: str) -> None:
        member = self._members.get(worker)
        if member is not None and member.standing is Standing.STALLED:
            member.standing = Standing.SERVING
            self._find_holders()

    def _find_holders(self) -> None:
        self._holders = {}
        for member in self._members.values():
            if member.standing is Standing.SERVING:
                for layer, experts in member.holds.items():
                    for expert in experts:
                        if self.class_map.of(layer, expert) == member.numeric_class:
                            self._holders.setdefault((layer, expert), []).append(member)
