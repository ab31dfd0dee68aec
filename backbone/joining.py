"""How workers come into the swarm: greetings, assignments, weights on demand, ready. Knows nothing of calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from zmq.utils import z85

from protocol.capabilities import wire_refusal
from protocol.errors import VersionMismatch
from protocol.frames import DType, Tensor, encode
from protocol.messages import (
    Assign,
    Attach,
    Chunk,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    Message,
    Ready,
    Refused,
    Welcome,
)
from protocol.schema import one_line

from .calls import Action
from .dispatch import Dispatcher
from .door import Door
from .gate import Gate, Sent
from .oracle import Kind, kind_of
from .placement import Candidate, Plan, class_of_experts
from .ranks import Rank, promised, rank_of
from .roster import Assigned, LiveWorker, Peer, Roster, WorkerReport
from .weights import SliceServer, expert_bytes
from .wire import Wire

log = logging.getLogger(__name__)

news = logging.getLogger("expertswarm.workers")  #: what a server's operator wants to read

CONNECTION_GONE = "its connection is gone"
ROWS_TO_KNOW = 1000  #: that a worker has computed before its speed is believed

Progress = Callable[[str, int, int], None]


class Place(Protocol):
    """See placement.place."""

    def __call__(
        self,
        expert_bytes: Mapping[int, Sequence[int]],
        candidates: Sequence[Candidate],
        *,
        usage: Mapping[tuple[int, int], int] | None = None,
        fixed: Mapping[tuple[int, int], str] | None = None,
    ) -> Plan: ...


class Joining:
    """Messages in; answers go out by the gate, and what it means for calls is returned as the dispatcher's actions.

    A plan is carried out in two strides: first everybody loads what is new to him beside what he has; when all have,
    everybody lets go of what the plan gives to others. What is asked for meanwhile is held by somebody all the time.
    """

    def __init__(
        self,
        gate: Gate,
        roster: Roster,
        slices: SliceServer,
        dispatcher: Dispatcher,
        wire: Wire = Wire(),  # noqa: B008 - frozen
        *,
        on_progress: Progress,
        is_probing: bool = True,
    ) -> None:
        self._gate, self._roster, self._slices, self._dispatcher = gate, roster, slices, dispatcher
        self._on_progress, self._is_probing, self._wire = on_progress, is_probing, wire
        self.kinds: Mapping[int, Kind] = {la: kind_of(slices.store, la) for la in slices.store.expert_tensors}
        self._epoch = 0
        self._sizes = expert_bytes(slices.store)
        self.changes = 0  #: counts who came and went
        self._told = ""  #: what the last plan says of what does not fit

    # ---- questions

    def own_have_greeted(self) -> bool:
        """Whether every worker that this backbone started has said hello. Nobody waits for others: they may never."""
        return all(peer.calls_route is not None for peer in self._roster if peer.is_local)

    def own_are_ready(self) -> bool:
        """Whether every worker of this backbone's that is here has loaded what it was assigned."""
        return not any(peer.is_loading for peer in self._roster if peer.is_local)

    def all_ready(self) -> bool:
        """Whether every worker that is here has loaded what it was assigned."""
        return not any(peer.is_loading for peer in self._roster)

    def live(self) -> list[LiveWorker]:
        """Those that serve, with what they hold and how fast they are found to be."""
        return [
            LiveWorker(
                name=peer.name,
                backend=peer.report.backend,
                is_local=peer.is_local,
                bytes_per_s=self.speed(peer),
                holds={layer: each.experts for layer, each in peer.assigned.items() if each.is_loaded},
            )
            for peer in self._roster
            if peer.is_here
        ]

    # ---- what the backbone does

    def plan(self, place: Place, usage: Mapping[tuple[int, int], int], *, is_free: bool) -> None:
        """Plan who holds what. A free plan fixes the class of each expert anew: only between two answers.

        `usage`: rows that each (layer, expert) has been asked for so far.
        """
        if is_free:
            for peer in self._roster.long_lost():
                self.forget(peer)
        peers = [peer for peer in self._roster if peer.is_here]
        # A copy costs nothing where the file is mapped; one that is sent has to be asked for, by a bound that has room.
        candidates = [
            Candidate(
                name=p.name,
                memory_bytes=p.memory_bytes,
                takes_copies=self._is_mapped(p) or p.memory_bytes > 0,
                numeric_class=p.report.numeric_class,
                held={layer: assigned.experts for layer, assigned in p.assigned.items()},
                speed=self.speed(p),
                is_f32=(p.rank or p.promise).is_f32,
                is_off=p.is_off,
            )
            for p in peers
        ]
        fixed = None
        if not is_free:
            classes = self._dispatcher.class_map.experts
            fixed = {(layer, e): kind for layer, kinds in classes.items() for e, kind in enumerate(kinds)}
        plan = place(self._sizes, candidates, usage=usage, fixed=fixed)
        told, self._told = self._told, plan.describe()
        if is_free and peers and self._told not in ("", told):
            log.warning("%s", self._told)
        if is_free:
            self._dispatcher.planned(class_of_experts(plan.holds, candidates))
        classes_now = self._dispatcher.class_map
        for peer in peers:
            kind = peer.report.numeric_class
            mine = {la: [e for e in es if classes_now.of(la, e) == kind] for la, es in plan.holds[peer.name].items()}
            peer.wanted = {layer: frozenset(experts) for layer, experts in mine.items() if experts}
        self._advance()

    def _advance(self) -> None:
        """Carry the plan out as far as that can be done now."""
        for peer in self._roster:
            if peer.is_here:
                both = {
                    layer: peer.wanted.get(layer, frozenset()) | self._held(peer, layer)
                    for layer in {*peer.wanted, *peer.assigned}
                }
                self._assign(peer, both if self._fits(peer, both) else peer.wanted)
        waiting = {p.name for p in self._roster if p.is_here and any(self._waits(p, layer) for layer in p.wanted)}
        if self.all_ready() and not waiting:
            for peer in self._roster:
                if peer.is_here:
                    self._assign(peer, peer.wanted)
        for peer in self._roster:
            if peer.is_here:
                peer.report.state = "loading" if peer.is_loading or peer.name in waiting else "serving"
                peer.report.experts = sum(len(assigned.experts) for assigned in peer.assigned.values())
                self._announce(peer)

    def _announce(self, peer: Peer) -> None:
        """Tell once of whoever came in and serves: each plan may have it load more, or begin with nothing for it."""
        report = peer.report
        if report.state == "serving" and report.experts and not (peer.is_announced or peer.is_local):
            peer.is_announced = True
            news.info("worker %s serves: %s, %s", peer.name, report.backend, report.device)

    def speed(self, peer: Peer) -> float | None:
        """Bytes of experts that a worker reads in a second, by its own word; None while that says little."""
        report = peer.report
        if report.rows < ROWS_TO_KNOW or report.seconds <= 0:
            return None
        sizes = [size for layer in self._sizes.values() for size in layer]
        return report.rows * sum(sizes) / len(sizes) / report.seconds

    def _held(self, peer: Peer, layer: int) -> frozenset[int]:
        assigned = peer.assigned.get(layer)
        return frozenset() if assigned is None else assigned.experts

    def _fits(self, peer: Peer, experts: Mapping[int, frozenset[int]]) -> bool:
        need = sum(self._bytes(layer, chosen) for layer, chosen in experts.items())
        return not peer.memory_bytes or need <= peer.memory_bytes

    def _assign(self, peer: Peer, experts: Mapping[int, frozenset[int]]) -> None:
        """Ask a worker to hold these in place of what it was assigned, layer by layer where that is another set.

        Layers that shrink come first: at no time is a worker asked for more than its memory.
        """
        changes = [
            (self._bytes(layer, after) - self._bytes(layer, self._held(peer, layer)), layer, after)
            for layer in {*experts, *peer.assigned}
            if (after := experts.get(layer, frozenset())) != self._held(peer, layer)
            and layer not in peer.cannot
            and not self._waits(peer, layer)
        ]
        for _, layer, after in sorted(changes, key=lambda change: change[:2]):
            # It is not asked any more for what it lets go of, be it for as long as it loads the rest.
            self._dispatcher.kept(peer.name, layer, after if self._keeps(peer, layer, after) else ())
            self._epoch += 1
            peer.assigned[layer] = Assigned(self._epoch, after)
            slices = self._slices.grant(peer.name, layer, sorted(after), by_path=peer.is_local)
            assign = Assign(self._epoch, layer, self._slices.store.activation(layer), slices)
            self.send(peer.calls_route, assign)

    def look_for_gone(self) -> list[Action]:
        """Workers from elsewhere whose connection is no more: one hears of that by sending. Nobody has to answer."""
        gone = [p for p in self._roster if p.is_here and not p.is_local]
        gone = [p for p in gone if self.send(p.calls_route, Welcome(p.name)) is Sent.GONE]
        return [action for peer in gone for action in self.lose(peer, CONNECTION_GONE)]

    def revoked(self, door: Door) -> list[Peer]:
        """Who was revoked since the last look; they are told."""
        if not door.has_changed():
            return []
        gone = [peer for peer in self._roster if not peer.is_local and door.worker(peer.key) is None]
        for peer in gone:
            self.send(peer.calls_route, Refused("this worker was revoked"))
        return gone

    def on_stranger(self, door: Door | None, key: bytes, route: bytes, frames: Sequence[Any]) -> Peer | None:
        """Somebody whom the roster does not know: an enrolled worker, whose entry is made, or one that enrols."""
        entry = None if door is None else door.worker(key)
        if entry is not None:
            name = self._roster.free_name(entry.name)
            peer = Peer(key, WorkerReport(name, self._dispatcher.tally(name)))
            self._roster.add(peer)
            return peer
        answer = None if door is None else door.answer(key, frames)
        if answer is None or isinstance(answer, Refused):
            reason = "it is no worker's" if answer is None else answer.reason
            self._roster.drop(f"the key {z85.decode(key).hex()[:12]}...", "a message", reason, time.monotonic())
        if answer is not None:
            self.send(route, answer)
        return None

    def route_is_anothers(self, route: bytes, key: bytes) -> list[Action]:
        """A connection of this key has that routing id now: what was to go there to another worker must not."""
        others = [p for p in self._roster if p.key != key]
        for peer in others:
            if peer.weights_route == route:
                peer.weights_route = None
        gone = [p for p in others if p.is_here and p.calls_route == route]
        for peer in gone:
            peer.calls_route = None
        return [action for peer in gone for action in self.lose(peer, CONNECTION_GONE)]

    def go_on(self) -> None:
        """Assign what had to wait for its digests."""
        if self._slices.digests.take_news():
            self._advance()

    def _waits(self, peer: Peer, layer: int) -> bool:
        """Whether a layer cannot be assigned to a worker yet: its digests are still being made."""
        digests = self._slices.digests
        return not self._is_mapped(peer) and digests.is_busy and not digests.is_known(layer)

    def _is_mapped(self, peer: Peer) -> bool:
        """Whether a worker maps the model file itself, so that it needs no digests."""
        return peer.is_local and self._slices.share_path

    def _bytes(self, layer: int, experts: frozenset[int]) -> int:
        return sum(self._sizes[layer][expert] for expert in experts)

    def _keeps(self, peer: Peer, layer: int, after: frozenset[int]) -> bool:
        """Whether a worker can serve a layer's experts while it loads others: its own reckoning (worker.state)."""
        before = peer.assigned.get(layer)
        if before is None or not peer.memory_bytes or self._is_mapped(peer):
            return True
        if not before.is_loaded:
            return False
        others = sum(self._bytes(la, each.experts) for la, each in peer.assigned.items() if la != layer)
        both = self._bytes(layer, before.experts) + self._bytes(layer, after)
        return before.experts <= after or after <= before.experts or others + both <= peer.memory_bytes

    def send(self, route: bytes | None, message: Message, tensors: Sequence[Tensor] = (), *, copy: bool = True) -> Sent:
        """Send one message."""
        return Sent.GONE if route is None else self._gate.send(route, encode(message, tensors), copy=copy)

    # ---- what workers say

    def on_message(self, peer: Peer, route: bytes, message: Message) -> list[Action]:
        """Anything but rows."""
        if isinstance(message, Hello):
            return self._on_hello(peer, route, message)
        if isinstance(message, Attach):
            peer.weights_route = route
            return []
        if peer.is_lost:  # what was on its way when it was given up, of which its log and ours have told
            self._roster.dropped += 1
            if isinstance(message, Fetch):
                self.send(route, Refused("the backbone has given this worker up"))
            return []
        if isinstance(message, Fetch) and route == peer.weights_route:
            return self._on_fetch(peer, route, message)
        if route != peer.calls_route:
            return self._drop(peer, f"{type(message).__name__} of a connection that is not the one for it")
        if isinstance(message, Ready):
            return self._on_ready(peer, message)
        if isinstance(message, Failed):
            return self._on_failed(peer, message)
        if isinstance(message, Goodbye):
            return self.lose(peer, f"it left: {message.reason}")
        return self._drop(peer, f"{type(message).__name__} of a worker that is enrolled")

    def _drop(self, peer: Peer, reason: str, what: str = "a message") -> list[Action]:
        self._roster.drop(f"worker {peer.name}", what, reason, time.monotonic())
        return []

    def refuse_version(self, peer: Peer, route: bytes, error: VersionMismatch) -> list[Action]:
        """A greeting of another version."""
        self.send(route, Refused(one_line(error)))
        return self.lose(peer, str(error))

    def _on_hello(self, peer: Peer, route: bytes, hello: Hello) -> list[Action]:
        reason = wire_refusal(hello.wire_dtypes, self._wire.kind)
        is_patient = peer.may_greet(time.monotonic())
        if not is_patient:
            reason = "it says hello again and again"
        if peer.is_barred:
            reason = "it sent garbage before and is not trusted any more in this run"
        if reason:
            self.send(route, Refused(one_line(reason)))
            self._drop(peer, reason, "a greeting")
            return self.lose(peer, reason, is_trusted=is_patient)
        is_back = peer.calls_route is not None or peer.is_lost
        actions = self.lose(peer, "its connection broke and came back") if is_back else []
        report = peer.report
        peer.calls_route, peer.memory_bytes, report.state = route, hello.memory_bytes, "joined"
        peer.wanted, peer.assigned, peer.cannot, peer.is_told, peer.is_announced = {}, {}, {}, False, False
        report.experts = 0
        peer.session += 1
        peer.promise = promised(hello.numeric_class.activations, hello.numeric_class.accumulation)
        peer.measured, peer.worst, peer.is_same_bits = set(), 0.0, None
        report.backend, report.device, report.build = hello.backend, hello.device, hello.build
        peer.declared = str(hello.numeric_class)
        if not peer.is_caught:
            report.numeric_class, report.rank, peer.rank = peer.declared, "", None
        elif rank_of(peer.caught_worst) is Rank.UNFIT:  # what an audit has found is for as long as we run
            report.state = "unfit"
        self.send(route, Welcome(report.name))
        self.changes += 1
        return [*actions, *self._dispatcher.joined(peer.name, report.numeric_class, peer.session, time.monotonic())]

    def _on_fetch(self, peer: Peer, route: bytes, fetch: Fetch) -> list[Action]:
        data = self._slices.read(peer.name, fetch)
        if data is None:
            wanted = f"bytes {fetch.offset} to {fetch.offset + fetch.length} of slice {fetch.sha256.hex()[:12]}"
            reason = f"{wanted} were not assigned to this worker"
            self.send(route, Refused(reason))
            return self._drop(peer, reason, "a wish for weights")
        chunk = Chunk(fetch.sha256, fetch.offset)
        if self.send(route, chunk, [Tensor(DType.U8, (len(data),), data)], copy=False) is not Sent.OK:
            return self.lose(peer, "it does not take the weights that it asks for")
        return []

    def _on_ready(self, peer: Peer, ready: Ready) -> list[Action]:
        assigned = peer.assigned.get(ready.layer)
        if assigned is None or ready.epoch != assigned.epoch or assigned.is_loaded:
            return self._drop(
                peer, f"it is ready with epoch {ready.epoch} of layer {ready.layer}, which is not awaited"
            )
        is_proven = not self._is_probing or not assigned.experts or self.kinds[ready.layer] in peer.measured
        peer.assigned[ready.layer] = replace(assigned, is_loaded=True, is_proven=is_proven)
        self._dispatcher.loaded(peer.name, ready.layer, assigned.epoch, assigned.experts, is_proven=is_proven)
        if not self._is_mapped(peer):
            self._slices.store.release(ready.layer)  # what was read to be sent
        if not assigned.experts:
            del peer.assigned[ready.layer]
        all_of_them = [each for p in self._roster if p.is_here for each in p.assigned.values()]
        self._on_progress("experts ready", sum(each.is_loaded for each in all_of_them), len(all_of_them))
        return self._settled(peer)

    def _on_failed(self, peer: Peer, failed: Failed) -> list[Action]:
        if failed.seq:
            return self._dispatcher.refused(peer.name, failed.seq, failed.reason, time.monotonic())
        layer = next((layer for layer, each in peer.assigned.items() if each.epoch == failed.epoch), None)
        if layer is None:
            return self._drop(peer, f"it cannot load epoch {failed.epoch}, which is not awaited")
        peer.cannot[layer] = failed.reason
        del peer.assigned[layer]
        held = self._dispatcher.held(peer.name, layer)
        if held is not None:  # what the layer had before is held still
            peer.assigned[layer] = Assigned(held.epoch, held.experts, is_loaded=True, is_proven=held.is_proven)
        return self._settled(peer)

    def _settled(self, peer: Peer) -> list[Action]:
        """A worker has answered to an assignment, perhaps to the last one."""
        if peer.is_loading:
            return []
        reason = next(iter(peer.cannot.values()), "")
        if reason and not peer.assigned:
            return self.lose(peer, f"it cannot load its experts: {reason}")
        if reason and not peer.is_told:
            peer.is_told = True
            peer.note(f"it cannot load experts of {len(peer.cannot)} layers: {reason}", is_trusted=True)
            log.warning("worker %s cannot load experts of %d layers: %s", peer.name, len(peer.cannot), reason)
        self._advance()
        return []

    def proven(self, peer: Peer, kind: Kind) -> list[Action]:
        """A worker's rows of a kind of experts were measured: it serves what it has loaded of that kind."""
        for layer, assigned in peer.assigned.items():
            if assigned.is_loaded and self.kinds[layer] == kind:
                peer.assigned[layer] = replace(assigned, is_proven=True)
                self._dispatcher.proven(peer.name, layer)
        return self._settled(peer)

    def demoted(self, peer: Peer) -> None:
        """A worker is of a class of its own from now on, or unfit: what it has is planned for anew."""
        self.changes += 1
        if peer.is_here and peer.rank is Rank.UNFIT:
            peer.wanted = {}
            self._assign(peer, {})
            peer.report.state, peer.report.experts = "unfit", 0
            self._advance()  # nobody waits for it any more

    def forget(self, peer: Peer, *, is_gone: bool = False) -> None:
        """Keep a worker that is lost in mind no more; `is_gone`: for ever."""
        self._roster.forget(peer, is_gone=is_gone)
        self._dispatcher.forget(peer.name)

    def gone(self, peer: Peer) -> None:
        """The dispatcher has given a worker up."""
        self._slices.forget(peer.name)
        self.changes += 1

    def lose(self, peer: Peer, reason: str, *, is_trusted: bool = True) -> list[Action]:
        """A worker is not to be used, whether calls had begun or not."""
        self._slices.forget(peer.name)
        actions = self._dispatcher.lost(peer.name, reason, time.monotonic(), is_trusted=is_trusted)
        self.changes += bool(actions) or not peer.is_lost
        if not actions and not peer.is_lost:
            peer.fail(reason, time.monotonic(), is_trusted=is_trusted)
            log.warning("worker %s is lost: %s", peer.name, reason)
        return actions
