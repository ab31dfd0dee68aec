"""How workers come into the swarm: greetings, assignments, weights on demand, ready. Knows nothing of calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

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

from .dispatch import Action, Dispatcher
from .gate import Gate, Sent
from .placement import Candidate, Plan, class_of_experts
from .roster import Peer, Roster
from .weights import SliceServer, expert_bytes

log = logging.getLogger(__name__)

Place = Callable[[Mapping[int, Sequence[int]], Sequence[Candidate]], Plan]
Progress = Callable[[str, int, int], None]


class Joining:
    """Messages in; answers go out by the gate, and what it means for calls is returned as the dispatcher's actions."""

    def __init__(
        self,
        gate: Gate,
        roster: Roster,
        slices: SliceServer,
        dispatcher: Dispatcher,
        *,
        on_progress: Progress,
    ) -> None:
        self._gate, self._roster, self._slices, self._dispatcher = gate, roster, slices, dispatcher
        self._on_progress = on_progress
        self._epoch = 0

    # ---- questions

    def all_greeted(self) -> bool:
        """Whether every worker has said hello."""
        return all(peer.calls_route is not None for peer in self._roster)

    def all_ready(self) -> bool:
        """Whether every worker that is left has loaded what it was assigned."""
        return not any(peer.to_load and not peer.is_lost for peer in self._roster)

    # ---- what the backbone does

    def assign(self, place: Place) -> None:
        """Give every worker its experts. With the plan the class of each expert is fixed."""
        # A copy costs nothing where the file is mapped; one that is sent has to be asked for, by a bound that has room.
        candidates = [
            Candidate(
                name=p.name,
                memory_bytes=p.memory_bytes,
                takes_copies=self._slices.share_path or p.memory_bytes > 0,
                numeric_class=p.report.numeric_class,
            )
            for p in self._roster
        ]
        plan = place(expert_bytes(self._slices.store), candidates)
        if plan.describe():
            log.warning("%s", plan.describe())
        self._dispatcher.planned(class_of_experts(plan.holds, candidates))
        for peer in self._roster:
            peer.holds = plan.holds.get(peer.name, {})
            self._send_assignment(peer)

    def _send_assignment(self, peer: Peer) -> None:
        """Assign what the plan gave to a worker, but for what is not, or is no more, of its class."""
        classes, kind = self._dispatcher.class_map, peer.report.numeric_class
        mine = {la: tuple(e for e in experts if classes.of(la, e) == kind) for la, experts in peer.holds.items()}
        peer.holds = {layer: experts for layer, experts in mine.items() if experts}
        peer.report.experts = sum(map(len, peer.holds.values()))
        self._epoch += 1
        peer.epoch, peer.to_load = self._epoch, set(peer.holds)
        peer.report.state = "loading" if peer.holds else "serving"
        for layer, experts in peer.holds.items():
            slices = self._slices.grant(peer.name, layer, experts)
            self.send(peer.calls_route, Assign(peer.epoch, layer, self._slices.store.activation(layer), slices))

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
        if isinstance(message, Fetch) and route == peer.weights_route:
            return self._on_fetch(peer, route, message)
        if route != peer.calls_route:
            self._roster.dropped += 1
            return []
        if isinstance(message, Ready):
            return self._on_ready(peer, message)
        if isinstance(message, Failed):
            return self._on_failed(peer, message)
        if isinstance(message, Goodbye):
            return self.lose(peer, f"it left: {message.reason}")
        self._roster.dropped += 1
        return []

    def refuse_version(self, peer: Peer, route: bytes, error: VersionMismatch) -> list[Action]:
        """A greeting of another version."""
        self.send(route, Refused(one_line(error)))
        return self.lose(peer, str(error))

    def _on_hello(self, peer: Peer, route: bytes, hello: Hello) -> list[Action]:
        reason = wire_refusal(hello.wire_dtypes)
        if peer.is_barred:
            reason = "it sent garbage before and is not trusted any more in this run"
        if reason:
            self.send(route, Refused(one_line(reason)))
            return self.lose(peer, reason)
        is_back = peer.calls_route is not None or peer.is_lost
        actions = self.lose(peer, "its connection broke and came back") if is_back else []
        report = peer.report
        peer.calls_route, peer.memory_bytes, report.state = route, hello.memory_bytes, "joined"
        report.backend, report.device, report.build = hello.backend, hello.device, hello.build
        report.numeric_class = str(hello.numeric_class)
        self.send(route, Welcome(report.name))
        if is_back:
            self._send_assignment(peer)
        return actions

    def _on_fetch(self, peer: Peer, route: bytes, fetch: Fetch) -> list[Action]:
        data = self._slices.read(peer.name, fetch)
        if data is None:
            self._roster.dropped += 1
            wanted = f"bytes {fetch.offset} to {fetch.offset + fetch.length} of slice {fetch.sha256.hex()[:12]}"
            self.send(route, Refused(f"{wanted} were not assigned to this worker"))
            log.warning("worker %s asked for weights that it was not assigned: %s", peer.name, wanted)
            return []
        chunk = Chunk(fetch.sha256, fetch.offset)
        if self.send(route, chunk, [Tensor(DType.U8, (len(data),), data)], copy=False) is not Sent.OK:
            return self.lose(peer, "it does not take the weights that it asks for")
        return []

    def _on_ready(self, peer: Peer, ready: Ready) -> list[Action]:
        if ready.epoch != peer.epoch or ready.layer not in peer.to_load:
            self._roster.dropped += 1
            return []
        peer.to_load.discard(ready.layer)
        layers = [len(p.holds) for p in self._roster]
        self._on_progress("experts ready", sum(layers) - sum(len(p.to_load) for p in self._roster), sum(layers))
        if peer.to_load:
            return []
        peer.report.state = "serving"
        kind = peer.report.numeric_class
        return self._dispatcher.joined(peer.name, kind, peer.epoch, peer.holds, time.monotonic())

    def _on_failed(self, peer: Peer, failed: Failed) -> list[Action]:
        if failed.seq:
            return self._dispatcher.refused(peer.name, failed.seq, failed.reason, time.monotonic())
        return self.lose(peer, f"it cannot load its experts: {failed.reason}")

    def lose(self, peer: Peer, reason: str, *, is_trusted: bool = True) -> list[Action]:
        """A worker is not to be used, whether calls had begun or not."""
        actions = self._dispatcher.lost(peer.name, reason, time.monotonic(), is_trusted=is_trusted)
        if not actions and not peer.is_lost:
            peer.fail(reason, is_trusted=is_trusted)
            log.warning("worker %s is lost: %s", peer.name, reason)
        return actions
