"""The swarm as an `ExpertSource`: the socket shell around dispatch. The thread that runs a step owns all of it.

One message to each touched worker a layer, rows put straight where they belong. What nobody else computes is computed
here: an answer is never lost, and where that is another numeric class, it is told (`class_changes`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from kernels.combine import is_finite
from kernels.interface import F32, I32
from protocol.errors import ProtocolError, VersionMismatch
from protocol.frames import DType, Tensor, decode_to_backbone, encode
from protocol.messages import Drain, Refused, Rows, Run
from protocol.schema import one_line

from .batch import Batch
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
    NewMap,
    ReportDropped,
    ReportLost,
    Send,
    Spare,
)
from .class_map import ClassMap, MapChange
from .dispatch import Dispatcher
from .door import Door
from .errors import BackboneError
from .experts import LocalRows
from .gate import Gate, Sent
from .joining import Joining, Place, Progress
from .lateness import HEDGE_S
from .local_workers import LocalWorker, WorkerSpec, start_worker
from .oracle import Judged, class_text
from .placement import place
from .provenance import cache_folder
from .roster import Earlier, LiveWorker, Peer, Roster, WorkerReport
from .slice_digests import SliceDigests
from .trust import Checks, Trust
from .weights import SliceServer
from .wire import NOT_ASKED_FOR, Wire, received

__all__ = ["Swarm", "WorkerReport", "WorkerSpec"]

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0  #: for the first word of a worker, and between any two while it loads
CALL_DEADLINE_S = 60.0  #: at most, and while nothing was measured
COPY_BELOW_BYTES = 64 * 1024  #: below this ZeroMQ's own copy is cheaper than keeping ours alive
PATIENCE_MS = 500
MOST_WAITING = 1024  #: messages that are looked at before anybody is called late
ROWS_TO_PLAN = 20_000  #: at least, between two plans for the sake of use
BOOK_S = 0.5  #: between two looks at the book of invites


@dataclass(slots=True)
class _Open:
    """A ticket's batch until its rows are taken, with the experts to compute here."""

    layer: int
    batch: Batch
    todo: deque[int] = field(default_factory=deque)
    is_complete: bool = False
    busiest_ns: int = 0


class Swarm:
    """Workers over an encrypted socket. A context manager: leaving it ends those that it started, and lets others go.

    Local ones are started from `specs`; through a `door` workers come in from elsewhere, whenever they like.
    `dense_class` is that of all but the experts, where it says more than the class of the backbone's own rows.
    `wire`: how rows go to experts and come from them. `placement`, `deadline_s`, `hedge_s` (no call is hedged before),
    `join_timeout_s` and `command` (another program in the worker's place) are for tests.
    """

    is_here = False

    def __init__(
        self,
        model: Judged,
        specs: Sequence[WorkerSpec],
        *,
        local: LocalRows,
        dense_class: str = "",
        wire: Wire = Wire(),  # noqa: B008 - frozen
        share_path: bool = True,
        placement: Place = place,
        deadline_s: float = CALL_DEADLINE_S,
        hedge_s: float = HEDGE_S,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        command: Sequence[str] | None = None,
        door: Door | None = None,
        checks: Checks = Checks(),  # noqa: B008 - frozen
        on_progress: Progress = lambda what, done, total: None,
    ) -> None:
        self._place, self._door, self._wire = placement, door, wire
        self._model, self._local, self._join_timeout_s = model, local, join_timeout_s
        counts = {layer: model.expert_count(layer) for layer in model.expert_tensors}
        class_map = ClassMap.of_backbone(class_text(model.numeric_class), counts, dense_class)
        self._dispatcher = Dispatcher(class_map, deadline_s=deadline_s, hedge_s=hedge_s)
        self._roster = Roster()
        self._open: dict[int, _Open] = {}
        self._ticket = 0
        self.busiest_ns = 0
        self.class_changes: list[MapChange] = []
        self._gate = Gate("tcp://127.0.0.1:*") if door is None else door.open()
        self._looked_s = time.monotonic()  #: at the book of invites
        self._planned: int | None = None  #: for which of the changes of who is here; None before the first plan
        self._planned_freely = 0  #: likewise, with the classes free
        self._planned_rows = 0  #: that had been asked for
        self.usage = Counter[tuple[int, int]]()  #: rows that each (layer, expert) was asked for so far
        self._rows = 0  #: in all
        # Whoever comes in by the door fetches his experts: their digests are made beside the work, and kept.
        self._digests = SliceDigests(model, None if door is None else cache_folder() / "slice-digests")
        if door is not None:
            self._digests.start()
        slices = SliceServer(model, share_path, self._digests)
        self._joining = Joining(
            *(self._gate, self._roster, slices, self._dispatcher, wire),
            on_progress=on_progress,
            is_probing=checks.is_probing,
        )
        self._trust = Trust(checks, model, self._dispatcher, self._roster, self._joining, self._act, wire)
        self._poller = zmq.Poller()
        self._poller.register(self._gate.socket, zmq.POLLIN)
        try:
            for number, spec in enumerate(specs, 1):
                self._start(f"local-{number}", spec, share_path, command)
            self._wait_until(self._joining.own_have_greeted, "said hello")
            known = -1
            while known != self._trust.demotions:  # who is found not to be of its class is planned for anew
                known = self._trust.demotions
                self._plan(is_free=True)
                # Who cannot hold its experts is told of and done without: they are computed elsewhere.
                self._wait_until(self._joining.own_are_ready, "loaded its experts", is_needed=False)
        except BaseException:
            self.close()
            raise

    # ---- ExpertSource

    def send(self, layer: int, x: F32, ids: I32) -> int:
        """Send a layer's rows x [T, D] to the holders of the experts ids [T, K]; a ticket comes back at once.

        `x` must stay as it is until the ticket's rows are taken.
        """
        self._ticket += 1
        width = self._model.expert_width(layer)
        batch = Batch(self._wire.rounded(x), ids, width)
        self._open[self._ticket] = _Open(layer, batch)
        load = batch.load()
        for expert, rows in load.items():
            self.usage[layer, expert] += rows
        self._rows += ids.size
        self._act(self._dispatcher.issued(self._ticket, layer, load, width, time.monotonic()))
        return self._ticket

    def ready(self, ticket: int) -> bool:
        """Whether all rows are here. Does not block."""
        held = self._open[ticket]
        if not held.is_complete:
            self._pump(0)
        return held.is_complete

    def wait(self, ticket: int) -> F32:
        """The rows [T, K, D] of a ticket, each unweighted."""
        held = self._open[ticket]
        while not held.is_complete:
            if held.todo:
                self._compute(ticket, held)
                self._pump(0)
            else:
                self._pump(self._patience_ms())
        del self._open[ticket]
        self.busiest_ns = held.busiest_ns
        return held.batch.out

    def _patience_ms(self) -> int:
        """How long there is nothing to do but to wait for a message."""
        due_s = self._dispatcher.next_deadline()
        return PATIENCE_MS if due_s is None else min(PATIENCE_MS, max(0, math.ceil((due_s - time.monotonic()) * 1000)))

    def abandon(self) -> None:
        """Forget every open ticket: whoever asked has gone."""
        for ticket in list(self._open):
            self._dispatcher.forgotten(ticket)
            del self._open[ticket]

    # ---- between answers

    def serve_due(self, timeout_s: float, wake: int | None = None) -> None:
        """Handle what comes, waiting for it at most so long, or until the file descriptor `wake` can be read.

        Only while no answer is in the making: whoever came or went is planned for, with a class map of its own.
        """
        if self._planned_freely != self._joining.changes or self._is_known_better:
            self._plan(is_free=True)
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)
        try:
            self._poller.poll(0 if self._trust.has_work else int(timeout_s * 1000))
        finally:
            if wake is not None:
                self._poller.unregister(wake)
        while self._pump(0):
            pass

    # ---- what became of it

    def report(self) -> list[WorkerReport]:
        """One entry for each worker, in the order of their start; see `earlier` for those lost long ago."""
        return [peer.report for peer in self._roster]

    @property
    def earlier(self) -> Earlier:
        """Workers that were lost long ago, of which no entry is kept."""
        return self._roster.earlier

    @property
    def local_calls(self) -> int:
        """Calls computed here because no worker did; hedges, which a worker does too, are not among them."""
        causes = self._dispatcher.computed_here
        return sum(causes.values()) - causes[Cause.HEDGED]

    def local_causes(self) -> dict[str, int]:
        """Why the backbone computed calls, hedges among them, with their numbers."""
        return {cause.value: count for cause, count in self._dispatcher.computed_here.items() if count}

    def live(self) -> list[LiveWorker]:
        """Those that serve, with what they hold and how fast they are found to be."""
        return self._joining.live()

    def pids(self) -> list[int]:
        """Process ids of the workers that this backbone started, in the order of their start."""
        return [peer.worker.pid for peer in self._roster if peer.worker is not None]

    @property
    def endpoint(self) -> str:
        """Where workers connect to."""
        return self._gate.endpoint

    def rows_of(self, worker: str, layer: int, x: F32, pairs: I32) -> F32:
        """Unweighted rows [P, D] of one worker for pairs of (row of x, expert). BackboneError when they do not come."""
        return self._trust.rows_of(worker, layer, x, pairs, lambda: self._pump(self._patience_ms()))

    @property
    def doubts(self) -> int:
        """How often an audit found a worker to be wrong."""
        return self._trust.caught

    @property
    def refused(self) -> int:
        """Who was turned away: handshakes of keys that are not admitted, and enrolments that came to nothing."""
        return self._gate.refused + (0 if self._door is None else self._door.refused)

    @property
    def class_map(self) -> ClassMap:
        """Which numeric class computes which expert, as it is now."""
        return self._dispatcher.class_map

    @property
    def dropped(self) -> int:
        """Messages and answers that were not used: malformed, late, twice, or not asked for."""
        return self._roster.dropped

    def close(self) -> None:
        """Let the workers go and end those that stay."""
        for peer in self._roster:
            self._joining.send(peer.calls_route, Drain("the backbone is done"))
            if peer.worker is not None:
                peer.worker.dismiss()
        for peer in self._roster:
            if peer.worker is not None:
                peer.worker.stop()
        self._gate.close()
        self._digests.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- starting

    def _start(self, name: str, spec: WorkerSpec, share_path: bool, command: Sequence[str] | None) -> None:
        gate, path = self._gate, self._model.path if share_path else None
        worker = start_worker(
            name, spec, endpoint=gate.endpoint, server_key=gate.public_key, model=path, command=command
        )
        gate.admit(worker.public_key)
        self._roster.add(Peer(worker.public_key, WorkerReport(name, self._dispatcher.tally(name)), worker))
        if worker.pidfd is not None:
            self._poller.register(worker.pidfd, zmq.POLLIN)

    def _wait_until(self, is_so: Callable[[], bool], what: str, *, is_needed: bool = True) -> None:
        give_up = time.monotonic() + self._join_timeout_s
        while not is_so():
            if self._pump(PATIENCE_MS):
                give_up = time.monotonic() + self._join_timeout_s
            for peer in self._roster:
                if peer.is_lost and peer.is_local and is_needed:
                    raise BackboneError(f"worker {peer.name} cannot serve: {peer.report.failures[-1]}")
            if time.monotonic() > give_up and self._dispatcher.next_deadline() is None:
                peer = next(
                    p for p in self._roster if p.is_local and not p.is_lost and (p.calls_route is None or p.is_loading)
                )
                words = f"; its last words: {line}" if peer.worker and (line := peer.worker.last_line()) else ""
                raise BackboneError(f"worker {peer.name} has not {what} within {self._join_timeout_s:g} s{words}")

    # ---- events

    @property
    def _is_known_better(self) -> bool:
        """Whether experts were asked for twice as often as when it was planned last: which are hot is known better."""
        return self._rows > 2 * self._planned_rows + ROWS_TO_PLAN

    def _plan(self, *, is_free: bool) -> None:
        self._planned = self._joining.changes
        if is_free:
            self._planned_freely = self._planned
        self._planned_rows = self._rows
        self._joining.plan(self._place, self.usage, is_free=is_free)

    def _pump(self, timeout_ms: int) -> bool:
        """Handle one message and whatever else is due, waiting at most so long for it; whether a message came."""
        heard = False
        for source, _ in (events := self._poller.poll(0 if self._trust.has_work else timeout_ms)):
            if source is not self._gate.socket:
                self._on_death(source)
            else:
                heard = self._hear()
        if not events:
            self._look_for_dead()
        if not events or self._trust.is_behind:
            self._trust.work()
        due_s = self._dispatcher.next_deadline()
        if due_s is not None and (now := time.monotonic()) >= due_s:
            # An answer that has waited here, while this process was busy, is not late.
            if not any(not self._hear() for _ in range(MOST_WAITING)):
                log.warning("messages come faster than they can be read")
            self._act(self._dispatcher.ticked(now))
        if self._planned is not None and (self._planned != self._joining.changes or self._is_known_better):
            self._plan(is_free=False)  # while an answer is in the making no expert changes its class
        if self._door is not None and time.monotonic() - self._looked_s > BOOK_S:
            self._looked_s = time.monotonic()
            for peer in self._joining.revoked(self._door):
                self._act(self._joining.lose(peer, "it was revoked"))
                self._joining.forget(peer, is_gone=True)
            self._act(self._joining.look_for_gone())
            self._joining.go_on()
        return heard

    def _hear(self) -> bool:
        """Handle one message, if there is one; whether there was."""
        received = self._gate.receive()
        if received is None:
            return False
        self._on_message(*received)
        return True

    def _on_death(self, pidfd: int) -> None:
        self._poller.unregister(pidfd)
        for peer in self._roster:
            if peer.worker is not None and peer.worker.pidfd == pidfd:
                self._lose_dead(peer, peer.worker)

    def _look_for_dead(self) -> None:
        """Where the system has no pidfd, the dead are found when nothing else happens."""
        for peer in self._roster:
            worker = peer.worker
            if worker is not None and worker.pidfd is None and not peer.is_lost and worker.has_ended():
                self._lose_dead(peer, worker)

    def _lose_dead(self, peer: Peer, worker: LocalWorker) -> None:
        self._gate.expel(peer.key)
        self._act(self._joining.lose(peer, worker.obituary()))

    def _on_message(self, key: bytes, route: bytes, frames: list[Any]) -> None:
        known = self._roster.of_key(key)
        if known is None or route not in (known.calls_route, known.weights_route):
            self._act(self._joining.route_is_anothers(route, key))
        peer = known or self._joining.on_stranger(self._door, key, route, frames)
        if peer is None:
            return
        try:
            message, tensors = decode_to_backbone(frames)
        except VersionMismatch as error:
            self._act(self._joining.refuse_version(peer, route, error))
        except ProtocolError as error:
            self._roster.drop(f"worker {peer.name}", "a message", str(error), time.monotonic())
            if route == peer.calls_route:
                self._act(self._joining.lose(peer, f"a message that cannot be read: {error}", is_trusted=False))
        else:
            if isinstance(message, Rows) and route == peer.calls_route:
                self._on_rows(peer, message, tensors[0])
            else:
                self._act(self._joining.on_message(peer, route, message))
                self._trust.loaded(peer)

    def _on_rows(self, peer: Peer, message: Rows, tensor: Tensor) -> None:
        if not self._wire.admits(tensor):
            self._act(self._dispatcher.garbage(peer.name, NOT_ASKED_FOR, time.monotonic()))
            return
        rows = received(tensor)
        actions = self._dispatcher.answered(
            peer.name,
            message.seq,
            message.epoch,
            rows.shape,
            time.monotonic(),
            is_finite=is_finite(rows),
            compute_s=message.compute_ns / 1e9,
        )
        if actions and isinstance(actions[0], Fill):
            call = actions[0].call
            held, rows = self._open[call.ticket], self._wire.rounded(rows)
            held.batch.fill(call.experts, rows, actions[0].only)
            held.busiest_ns = max(held.busiest_ns, message.compute_ns)
            peer.report.calls += 1
            peer.report.rows += call.pairs
            peer.report.seconds += message.compute_ns / 1e9
            self._trust.served(peer, call, held.batch, rows)
        elif actions and isinstance(actions[0], Checked):
            self._trust.came(actions[0], rows)
            return
        self._act(actions)

    # ---- actions

    def _act(self, actions: Sequence[Action]) -> None:
        # All calls are put together before the first is sent: workers on this machine then start side by side.
        ready = [self._put_together(action.call) for action in actions if isinstance(action, Send)]
        for call, frames, is_small in ready:
            self._send_call(call, frames, copy=is_small)
        for action in actions:
            if isinstance(action, ComputeLocally):
                self._open[action.ticket].todo += action.experts
            elif isinstance(action, Spare):
                held = self._open[action.ticket]
                held.todo = deque(expert for expert in held.todo if expert not in action.experts)
            elif isinstance(action, Complete):
                self._open[action.ticket].is_complete = True
            elif isinstance(action, ReportLost):
                self._on_lost(action)
            elif isinstance(action, NewMap):
                self._on_new_map(action)
            elif isinstance(action, CheckFailed):
                self._trust.came(action)
            elif isinstance(action, ReportDropped):
                self._roster.dropped += 1
                log.debug("worker %s: dropped %s", action.worker, action.reason)

    def _put_together(self, call: Call) -> tuple[Call, list[Any], bool]:
        """A call with its message, and whether a copy of that costs less than keeping it."""
        is_apart = call.ticket == APART
        x, pairs = self._trust.request(call) if is_apart else self._open[call.ticket].batch.request(call.experts)
        is_exact = is_apart and self._trust.is_exact(call)
        tensors = [self._wire.sent(x, is_exact=is_exact), Tensor(DType.I32, pairs.shape, pairs)]
        run = Run(call.seq, call.epoch, call.layer)
        return call, encode(run, tensors), x.nbytes < COPY_BELOW_BYTES

    def _send_call(self, call: Call, frames: list[Any], *, copy: bool) -> None:
        self._gate.asked_for(call.pairs * call.width * 4)
        route = self._roster.named(call.worker).calls_route
        sent = Sent.GONE if route is None else self._gate.send(route, frames, copy=copy)
        if sent is Sent.FULL:
            log.warning("worker %s is stalled: it takes no more messages", call.worker)
            self._act(self._dispatcher.unsent(call.seq, time.monotonic()))
        elif sent is Sent.GONE:
            self._act(self._dispatcher.lost(call.worker, "its connection is gone", time.monotonic()))

    def _compute(self, ticket: int, held: _Open) -> None:
        """Compute one expert of a ticket's todo here."""
        expert = held.todo.popleft()
        places = held.batch.places((expert,))
        rows = self._wire.rounded(self._local.rows(held.layer, expert, held.batch.inputs(places)))
        held.batch.fill_places(places, rows)
        self._act(self._dispatcher.computed(ticket, expert, time.monotonic(), is_finite=is_finite(rows)))

    def _on_lost(self, lost: ReportLost) -> None:
        peer = self._roster.named(lost.worker)
        if lost.session == peer.session:
            peer.fail(lost.reason, time.monotonic(), is_trusted=lost.is_trusted)
            # One that only took too long may be well again: it is to greet anew, when it reads this.
            bye = Drain(one_line(lost.reason)) if lost.is_trusted else Refused(one_line(lost.reason))
            self._joining.send(peer.calls_route, bye)
            self._joining.gone(peer)
        else:
            peer.note(lost.reason, is_trusted=lost.is_trusted)
        log.warning("worker %s is lost: %s; its calls go to others, or are computed here", lost.worker, lost.reason)

    def _on_new_map(self, new: NewMap) -> None:
        change = MapChange(new.before.digest, new.after.digest)
        self.class_changes.append(change)
        log.warning(
            "the numeric class changed: %d experts are computed here from now on, as %s; class map %s, before %s",
            len(new.experts),
            new.after.own,
            change.after[:12],
            change.before[:12],
        )
