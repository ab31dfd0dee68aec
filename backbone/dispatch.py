"""In-flight expert calls as a pure state machine.

Rule 1: every transition is here. Rule 2: no sockets, no clock, no arrays: time arrives in events, actions go out.
Rule 3: whatever happens, each expert of a ticket is done exactly once: by a worker's rows, or computed locally when
nobody holds it. A call whose worker was lost, answered garbage, was too late, or could not be sent to is asked of other
holders first. Rule 4: which worker serves changes who computes a row, never how: only members of the class that the
class map gives an expert may do it. Where the backbone has to, and is of another class, a new map begins: the expert
is the backbone's for the rest of the run. What was asked under the earlier map and comes still counts.

A ticket is one layer's `experts` for a batch of rows; it is cut into calls, one for each worker that holds some of the
chosen experts. The shell carries the actions out: sends, places rows, computes, tells about a lost worker or a new map.

Each call has a time by which it is late, from what was measured of its worker (`pace`). A call that takes much longer
than expected is hedged, once: its experts are also asked of others of the class, or computed here where that is the
backbone's own. Whoever is first with an expert does it; the straggler stays, is chosen last for a while, and is lost
only when its deadline passes. Rows that are not finite may be their sender's fault or the input's: the sender is a
suspect, and gets no calls, until somebody else has done the same experts; of two who fail at them the backbone is the
judge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from .calls import (
    APART,
    Action,
    Call,
    Cause,
    Checked,
    CheckFailed,
    Complete,
    ComputeLocally,
    Fill,
    Flight,
    Held,
    Member,
    NewMap,
    ReportDropped,
    ReportLost,
    Send,
    Spare,
    Standing,
    Suspicion,
    Ticket,
)
from .choice import choose_among, holders_of
from .class_map import ClassMap
from .lateness import HEDGE_S, due
from .pace import Pace
from .tally import Tally

SHUNNED_S = 64.0  #: a straggler is chosen last for 1 s, 2 s, 4 s ... and at most so long


class Dispatcher:
    """Events in, actions out. Every method but the questions is an event; each returns what to do, in order.

    `deadline_s`: of a call of which nothing was measured, and the longest of any. `hedge_s`: see HEDGE_S.
    """

    def __init__(self, class_map: ClassMap, *, deadline_s: float, hedge_s: float = HEDGE_S) -> None:
        self.class_map = class_map  #: the one in force
        self.computed_here: Counter[Cause] = Counter()  #: calls that the backbone was given to do
        self._deadline_s, self._hedge_s = deadline_s, hedge_s
        self._members: dict[str, Member] = {}
        self._tallies: dict[str, Tally] = {}
        self._holders: dict[tuple[int, int], list[Member]] = {}  #: (layer, expert) to those that serve it
        self._calls: dict[int, Flight] = {}
        self._open: dict[int, Ticket] = {}
        self._seq = 0
        self._worked_s = 0.0  #: by all members: the round trips of all answers

    # ---- questions

    def next_deadline(self) -> float | None:
        """When `ticked` has something to do: the first call in flight is late, or to be hedged."""
        calls = self._calls
        return min([flight.due_s for flight in calls.values()]) if calls else None

    def standing(self, worker: str) -> Standing | None:
        """Whether a worker gets calls; None for one that never joined."""
        member = self._members.get(worker)
        return None if member is None else member.standing

    def held(self, worker: str, layer: int) -> Held | None:
        """What a worker holds of a layer."""
        member = self._members.get(worker)
        return None if member is None else member.holds.get(layer)

    def others(self, worker: str, layer: int, expert: int) -> list[str]:
        """Who else of a worker's class serves an expert."""
        kind = self._members[worker].numeric_class if worker in self._members else None
        able = self._holders.get((layer, expert), ())
        return [member.name for member in able if member.name != worker and member.numeric_class == kind]

    def tally(self, worker: str) -> Tally:
        """What a worker's failures cost; the same object for all its life."""
        return self._tallies.setdefault(worker, Tally())

    # ---- events: workers

    def planned(self, classes: Mapping[tuple[int, int], str]) -> None:
        """A plan was accepted, between two answers: it fixes the class of each (layer, expert) that it gives."""
        self.class_map = self.class_map.afresh(classes)
        self._holders = holders_of(self._members.values(), self.class_map)

    def joined(self, worker: str, numeric_class: str, session: int, now_s: float) -> list[Action]:
        """A worker said hello, for the first time or again. It holds nothing yet."""
        actions = self.lost(worker, "it joined again", now_s)
        self._members[worker] = Member(worker, numeric_class, session)
        return actions

    def loaded(self, worker: str, layer: int, epoch: int, experts: Collection[int], *, is_proven: bool = True) -> None:
        """A worker has loaded experts of a layer, in place of those that it had of it before.

        Until they are proven it can be asked for them apart, and serves none of them.
        """
        member = self._members.get(worker)
        if member is None or member.standing is Standing.LOST:
            return
        member.holds[layer] = Held(epoch, frozenset(experts), is_proven)
        self._holders = holders_of(self._members.values(), self.class_map)

    def proven(self, worker: str, layer: int) -> None:
        """A worker's rows of what it holds of a layer were measured: it serves them, as far as the map lets it."""
        if (held := self.held(worker, layer)) is not None:
            self.loaded(worker, layer, held.epoch, held.experts)

    def kept(self, worker: str, layer: int, experts: Collection[int]) -> None:
        """Of what a worker holds of a layer it is asked for no more than these."""
        if (held := self.held(worker, layer)) is not None:
            mine = held.experts & frozenset(experts)
            self.loaded(worker, layer, held.epoch, mine, is_proven=held.is_proven)

    def lost(
        self, worker: str, reason: str, now_s: float, *, is_trusted: bool = True, cause: Cause = Cause.LOST
    ) -> list[Action]:
        """A worker died, left or hangs: its calls go to other holders, else they are computed locally."""
        member = self._members.get(worker)
        if member is None or member.standing is Standing.LOST:
            return []
        return self._lose([(member, reason)], now_s, cause, is_trusted=is_trusted)

    def forget(self, worker: str) -> None:
        """A worker that is lost, and of which no call is open, is not to be known any more."""
        self._members.pop(worker, None)
        self._tallies.pop(worker, None)

    def garbage(self, worker: str, reason: str, now_s: float) -> list[Action]:
        """A worker sent what it must not: it is trusted no more."""
        return self.lost(worker, reason, now_s, is_trusted=False, cause=Cause.GARBAGE)

    def reclassed(self, worker: str, numeric_class: str, now_s: float) -> list[Action]:
        """A worker's rows are not of the class that it said, but of this one: others do what it was asked for."""
        member = self._members.get(worker)
        if member is None or member.standing is Standing.LOST or member.numeric_class == numeric_class:
            return []
        served = [key for key, able in self._holders.items() if member in able]
        member.numeric_class = numeric_class
        self._holders = holders_of(self._members.values(), self.class_map)
        actions = self._taken_over(served)
        for flight in [self._calls[seq] for seq in sorted(member.in_flight)]:
            if not flight.is_stray:
                actions += self._handed_over(flight, now_s, Cause.DEMOTED)
        return actions

    # ---- events: tickets and calls

    def issued(self, ticket: int, layer: int, load: Mapping[int, int], width: int, now_s: float) -> list[Action]:
        """A layer asks for experts, each for so many rows (expert to rows), each row to have `width` values."""
        if not load:
            return [Complete(ticket)]
        self._open[ticket] = Ticket(layer, load, width, left=set(load))
        return self._given_out(ticket, tuple(load), now_s, Cause.UNHELD)

    def asked_apart(self, worker: str, layer: int, load: Mapping[int, int], width: int, now_s: float) -> list[Action]:
        """Somebody wants rows of a worker for their own sake: `Checked` or `CheckFailed` will tell.

        `load` and `width` as of `issued`; all of it is asked of this worker, proven or not. Nothing when it does not
        hold them, or is lost. Like any call this one has a deadline; but nobody else is asked in its place.
        """
        member, held = self._members.get(worker), self.held(worker, layer)
        if member is None or held is None or member.standing is Standing.LOST or not load.keys() <= held.experts:
            return []
        return [Send(self._call(APART, Ticket(layer, load, width, left=set()), worker, tuple(load), now_s))]

    def answered(
        self,
        worker: str,
        seq: int,
        epoch: int,
        shape: tuple[int, ...],
        now_s: float,
        *,
        is_finite: bool,
        compute_s: float = 0.0,
    ) -> list[Action]:
        """Rows came. They count only from the worker that was asked, once, of the right epoch and shape, finite.

        `compute_s`: how long the worker says that it computed.
        """
        flight = self._calls.get(seq)
        if flight is None or flight.call.worker != worker:
            if seq > self._seq and worker in self._members:
                return self.garbage(worker, f"rows of call {seq}, which was never made", now_s)
            self._awake(worker)
            return [ReportDropped(worker, f"rows of call {seq}, which is not in flight there")]
        call = flight.call
        if epoch != call.epoch:
            return self.garbage(worker, f"call {seq}: rows of epoch {epoch}, asked of epoch {call.epoch}", now_s)
        if shape != (call.pairs, call.width):
            return self.garbage(worker, f"call {seq}: rows {shape}, asked for {(call.pairs, call.width)}", now_s)
        self._end(flight)
        member = self._members[worker]
        member.answered(call, flight.sent_s, now_s, compute_s, self._worked_s)
        self._worked_s += now_s - flight.sent_s
        self._awake(worker)
        if flight.is_stray:
            return [Checked(call)] if call.ticket == APART else []
        if not is_finite:
            return self._suspected(member, flight, now_s)
        member.late = 0
        if flight.is_hedged:
            self.tally(worker).hedged_won += 1
        left = self._open[call.ticket].left
        only = None if left.issuperset(call.experts) else tuple([e for e in call.experts if e in left])
        return [Fill(call, only), *self._done(call.ticket, only or call.experts, now_s)]

    def refused(self, worker: str, seq: int, reason: str, now_s: float) -> list[Action]:
        """The worker says that it cannot do a call. It is believed, and asked no more."""
        flight = self._calls.get(seq)
        if flight is None or flight.call.worker != worker:
            return [ReportDropped(worker, f"refusal of call {seq}, which is not in flight there")]
        reason = f"it refused call {seq}, layer {flight.call.layer}: {reason}"
        return self.lost(worker, reason, now_s, cause=Cause.REFUSED)

    def unsent(self, seq: int, now_s: float) -> list[Action]:
        """The worker's queue is full, so that the call did not go: the worker is left alone until it answers."""
        flight = self._calls.get(seq)
        if flight is None:
            return []
        member = self._members[flight.call.worker]
        if member.standing is Standing.SERVING:
            member.standing = Standing.STALLED
            self._holders = holders_of(self._members.values(), self.class_map)
        return self._handed_over(flight, now_s, Cause.STALLED)

    def computed(self, ticket: int, expert: int, now_s: float, *, is_finite: bool = True) -> list[Action]:
        """An expert of a ticket was computed locally."""
        asked = self._open.get(ticket)
        if asked is None or expert not in asked.here:
            return []
        asked.here.discard(expert)
        if not is_finite:
            return self._at_fault(ticket, expert, now_s)
        if self.class_map.of(asked.layer, expert) == self.class_map.own:
            return self._done(ticket, (expert,), now_s)
        asked.checked.add(expert)
        return self._found_finite(ticket, (expert,), now_s)

    def ticked(self, now_s: float) -> list[Action]:
        """Time has passed: whoever has a late call is lost; calls that take long are hedged."""
        late: dict[str, tuple[Member, str]] = {}
        for flight in self._calls.values():
            if flight.call.deadline_s <= now_s and flight.call.worker not in late:
                reason = f"no answer within {flight.call.deadline_s - flight.sent_s:.3g} s"
                late[flight.call.worker] = self._members[flight.call.worker], reason
        actions = self._lose(list(late.values()), now_s, Cause.LATE) if late else []
        for flight in [flight for flight in self._calls.values() if flight.hedge_s <= now_s]:
            actions += self._hedged(flight, now_s)
        return actions

    def forgotten(self, ticket: int) -> list[Action]:
        """Nobody wants the ticket's rows any more. Answers still to come are dropped."""
        asked = self._open.pop(ticket, None)
        for flight in [f for f in self._calls.values() if f.call.ticket == ticket and not f.is_stray]:
            self._end(flight)
        if asked is not None and asked.suspicions:  # nothing was found against them
            suspects = [suspicion.member for suspicion in asked.suspicions]
            asked.suspicions.clear()
            self._clear(suspects)
        return []

    # ---- inside: losses

    def _lose(
        self, members: Sequence[tuple[Member, str]], now_s: float, cause: Cause, *, is_trusted: bool = True
    ) -> list[Action]:
        """All at once, with their reasons, so that no call of one is asked of another that is lost as well."""
        for member, _ in members:
            member.standing = Standing.LOST
        self._holders = holders_of(self._members.values(), self.class_map)
        actions: list[Action] = [ReportLost(m.name, m.session, reason, is_trusted) for m, reason in members]
        actions += self._taken_over(
            (layer, expert)
            for member, _ in members
            for layer, held in member.holds.items()
            for expert in held.experts
            if self.class_map.of(layer, expert) == member.numeric_class
        )
        for flight in [self._calls[seq] for member, _ in members for seq in sorted(member.in_flight)]:
            actions += self._handed_over(flight, now_s, cause)
        for member, _ in members:  # nobody is compared with the dead; whoever comes back loads and is measured anew
            member.pace, member.holds = Pace(), {}
        for ticket, asked in [(n, asked) for n, asked in self._open.items() if asked.suspicions or asked.checked]:
            asked.suspicions = [s for s in asked.suspicions if s.member.standing is not Standing.LOST]
            actions += self._settled(ticket, now_s)
        return actions

    def _handed_over(self, flight: Flight, now_s: float, cause: Cause) -> list[Action]:
        """Whoever was asked does not do a call. An answer to it that still comes is dropped."""
        self._end(flight)
        if flight.is_stray:
            return [CheckFailed(flight.call)] if flight.call.ticket == APART else []
        tally = self.tally(flight.call.worker)
        tally.retried += 1
        tally.waited_s += now_s - flight.sent_s
        return self._given_out(flight.call.ticket, self._undone(flight.call), now_s, cause)

    def _undone(self, call: Call) -> list[int]:
        """Experts of a call that are not done, nor being done by anybody else."""
        asked = self._open[call.ticket]
        wanted = [e for e in call.experts if e in asked.left and e not in asked.here and e not in asked.checked]
        others = [f.call.experts for f in self._calls.values() if f.call.ticket == call.ticket and f.call is not call]
        return [e for e in wanted if not any(e in experts for experts in others)]

    # ---- inside: hedges

    def _hedged(self, flight: Flight, now_s: float) -> list[Action]:
        """A call takes long: others of the class, or the backbone if it is the only other of the class, do it too."""
        call = flight.call
        flight.hedge_s, flight.due_s = math.inf, call.deadline_s
        asked, straggler = self._open[call.ticket], self._members[call.worker]
        others: dict[int, list[Member]] = {}
        here: list[int] = []
        for expert in call.experts:
            if expert not in asked.left:
                continue
            kind, holders = self.class_map.of(call.layer, expert), self._holders.get((call.layer, expert), ())
            able = [m for m in holders if m is not straggler and m.numeric_class == straggler.numeric_class]
            if able:
                others[expert] = able
            elif kind == self.class_map.own == straggler.numeric_class and expert not in asked.here:
                here.append(expert)
        if not others and not here:
            return []
        flight.is_hedged = asked.is_hedged = True
        chosen: dict[str, list[int]] = {}
        choose_among(others, asked.load, chosen, self._members, self._calls.values(), self._worked_s, now_s)
        actions: list[Action] = [
            Send(self._call(call.ticket, asked, name, mine, now_s, is_hedge=True)) for name, mine in chosen.items()
        ]
        return actions + (self._here(call.ticket, here, Cause.HEDGED) if here else [])

    def _astray(self, ticket: int, asked: Ticket, now_s: float) -> None:
        """Calls of which nothing is left to do are waited for no more."""
        for flight in self._calls.values():
            call = flight.call
            if call.ticket != ticket or flight.is_stray or not asked.left.isdisjoint(call.experts):
                continue
            flight.is_stray, flight.hedge_s, flight.due_s = True, math.inf, call.deadline_s
            if flight.is_hedged:
                tally, member = self.tally(call.worker), self._members[call.worker]
                tally.hedged_lost += 1
                tally.waited_s += now_s - flight.sent_s
                member.strays += 1
                member.late += 1
                member.shunned_until_s = now_s + min(SHUNNED_S, 2.0 ** (member.late - 1))

    # ---- inside: rows that are not finite

    def _suspected(self, member: Member, flight: Flight, now_s: float) -> list[Action]:
        """Others do the experts, to see whose fault it is; where one has failed at them before, the backbone does."""
        call = flight.call
        asked = self._open[call.ticket]
        before = asked.unclear
        reason = f"call {call.seq}, layer {call.layer}: rows that are not finite"
        asked.suspicions.append(Suspicion(member, reason, asked.left.intersection(call.experts) - asked.checked))
        if member.standing is not Standing.SUSPECT:
            member.standing = Standing.SUSPECT
            self._holders = holders_of(self._members.values(), self.class_map)
        tally, again = self.tally(member.name), self._undone(call)
        tally.retried += 1
        tally.waited_s += now_s - flight.sent_s
        actions = self._given_out(call.ticket, [e for e in again if e not in before], now_s, Cause.NOT_FINITE)
        here = [e for e in again if e in before]
        return actions + (self._here(call.ticket, here, Cause.NOT_FINITE) if here else [])

    def _found_finite(self, ticket: int, experts: Collection[int], now_s: float) -> list[Action]:
        """Somebody gave finite rows of these: whoever did not is not to be trusted once that is so for all of them."""
        asked = self._open[ticket]
        for suspicion in asked.suspicions:
            suspicion.experts.difference_update(experts)
        guilty = {s.member.name: (s.member, s.reason) for s in asked.suspicions if not s.experts}
        if guilty:
            return self._lose(list(guilty.values()), now_s, Cause.NOT_FINITE, is_trusted=False)
        return self._settled(ticket, now_s)

    def _at_fault(self, ticket: int, expert: int, now_s: float) -> list[Action]:
        """The backbone's rows are not finite either: it is the input's fault, or the weights'; the request will end."""
        asked = self._open[ticket]
        cleared = [s for s in asked.suspicions if expert in s.experts]
        asked.suspicions = [s for s in asked.suspicions if expert not in s.experts]
        self._clear([suspicion.member for suspicion in cleared])
        done = {expert, *(e for s in cleared for e in asked.checked if e in s.experts)}
        asked.checked -= done
        return self._done(ticket, tuple(sorted(done)), now_s, is_finite=False)

    def _clear(self, members: Iterable[Member]) -> None:
        """Suspects serve again, but for those of which there is another suspicion."""
        suspected = {s.member.name for asked in self._open.values() for s in asked.suspicions}
        for member in members:
            if member.standing is Standing.SUSPECT and member.name not in suspected:
                member.standing = Standing.SERVING
        self._holders = holders_of(self._members.values(), self.class_map)

    def _settled(self, ticket: int, now_s: float) -> list[Action]:
        """What was computed here as a check and is under no suspicion any more counts, or is asked for again."""
        asked = self._open.get(ticket)
        if asked is None or not (clear := asked.checked - asked.unclear):
            return []
        asked.checked -= clear
        ours = [e for e in sorted(clear) if self.class_map.of(asked.layer, e) == self.class_map.own]
        theirs = [e for e in sorted(clear) if e not in ours]
        actions = self._given_out(ticket, theirs, now_s, Cause.NOT_FINITE)
        return actions + (self._done(ticket, ours, now_s) if ours else [])

    # ---- inside: who does what

    def _given_out(self, ticket: int, experts: Collection[int], now_s: float, cause: Cause) -> list[Action]:
        """Calls for some experts of a ticket to those that hold them; what nobody holds is to be computed here."""
        asked = self._open[ticket]
        layer, load, holders = asked.layer, asked.load, self._holders
        chosen: dict[str, list[int]] = {}
        several: dict[int, list[Member]] = {}
        alone: list[int] = []
        slow: list[int] = []
        for expert in experts:
            able = holders.get((layer, expert))
            if able is None:
                alone.append(expert)
            elif able[0].strays and able[0].numeric_class == self.class_map.own and all(m.strays for m in able):
                slow.append(expert)
            elif len(able) > 1:
                several[expert] = able
            elif (name := able[0].name) in chosen:
                chosen[name].append(expert)
            else:
                chosen[name] = [expert]
        if several:
            choose_among(several, load, chosen, self._members, self._calls.values(), self._worked_s, now_s)
        actions: list[Action] = [Send(self._call(ticket, asked, name, mine, now_s)) for name, mine in chosen.items()]
        # What is sent first runs while the rest is computed here.
        if slow:
            actions += self._here(ticket, slow, Cause.STRAGGLING)
        if alone:
            doubted = asked.unclear  # whose last holder may be innocent, and be of its class still
            actions += self._taken_over((layer, expert) for expert in alone if expert not in doubted)
            actions += self._here(ticket, alone, cause)
        return actions

    def _here(self, ticket: int, experts: Sequence[int], cause: Cause) -> list[Action]:
        asked = self._open[ticket]
        asked.here.update(experts)
        self.computed_here[cause] += 1
        return [ComputeLocally(ticket, asked.layer, tuple(experts))]

    def _taken_over(self, experts: Iterable[tuple[int, int]]) -> list[Action]:
        """Those of some (layer, expert) that nobody serves are of the backbone's class from here on."""
        before, unserved = self.class_map, [key for key in experts if key not in self._holders]
        self.class_map = before.taken_over(unserved)
        if self.class_map is before:
            return []
        self._holders = holders_of(self._members.values(), self.class_map)
        changed = tuple(sorted({key for key in unserved if before.of(*key) != before.own}))
        return [NewMap(changed, before, self.class_map)]

    def _call(
        self, ticket: int, asked: Ticket, worker: str, experts: Sequence[int], now_s: float, *, is_hedge: bool = False
    ) -> Call:
        self._seq += 1
        member, count, pairs = self._members[worker], len(experts), sum([asked.load[expert] for expert in experts])
        may_hedge, is_apart = not is_hedge and ticket != APART, ticket == APART
        late_s, hedge_s = due(member, count, pairs, now_s, self._deadline_s, self._hedge_s, may_hedge=may_hedge)
        epoch = member.holds[asked.layer].epoch
        call = Call(self._seq, ticket, worker, asked.layer, epoch, tuple(experts), pairs, asked.width, late_s)
        self._calls[call.seq] = Flight(call, now_s, hedge_s, min(hedge_s, late_s), is_stray=is_apart)
        member.in_flight.add(call.seq)
        return call

    def _end(self, flight: Flight) -> None:
        member = self._members[flight.call.worker]
        del self._calls[flight.call.seq]
        member.in_flight.discard(flight.call.seq)
        if flight.is_stray and flight.is_hedged:
            member.strays -= 1

    def _done(self, ticket: int, experts: Collection[int], now_s: float, *, is_finite: bool = True) -> list[Action]:
        asked, actions = self._open[ticket], list[Action]()
        asked.left.difference_update(experts)
        if asked.here and (spared := asked.here.intersection(experts)):
            asked.here -= spared
            actions.append(Spare(ticket, tuple(sorted(spared))))
        if asked.is_hedged:
            self._astray(ticket, asked, now_s)
        if asked.suspicions and is_finite:
            actions += self._found_finite(ticket, experts, now_s)
        if not asked.left and self._open.get(ticket) is asked:
            del self._open[ticket]
            actions.append(Complete(ticket))
        return actions

    def _awake(self, worker: str) -> None:
        member = self._members.get(worker)
        if member is not None and member.standing is Standing.STALLED:
            member.standing = Standing.SERVING
            self._holders = holders_of(self._members.values(), self.class_map)
