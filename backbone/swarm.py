"""The swarm as an `ExpertSource`: the socket shell around dispatch. The thread that runs a step owns all of it.

One message to each touched worker a layer, one poll, rows put straight where they belong. What nobody else computes is
computed here, so that an answer never depends on who is alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq

from kernels.interface import F32, NumericClass
from protocol import PROTOCOL_VERSION
from protocol.errors import ProtocolError
from protocol.frames import DType, Tensor, decode_to_backbone, encode
from protocol.messages import (
    Assign,
    Attach,
    Chunk,
    ClassInfo,
    Drain,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    Message,
    Ready,
    Refused,
    Rows,
    Run,
    Welcome,
)

from .dispatch import Action, ComputeLocally, Dispatcher, Dropped, Fill, Lost, Pair, Send
from .errors import BackboneError
from .experts import I32
from .gate import Gate
from .local_workers import LocalWorker, WorkerSpec, start_worker
from .model import Model
from .placement import Candidate, Plan, place
from .weights import SliceServer, expert_bytes

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
CALL_DEADLINE_S = 60.0
COPY_BELOW_BYTES = 64 * 1024
Place = Callable[[Mapping[int, Sequence[int]], Sequence[Candidate]], Plan]
Progress = Callable[[str, int, int], None]


class LocalRows(Protocol):
    """Computes rows of an expert in this process."""

    def rows(self, layer: int, expert: int, x: F32) -> F32:
        """Unweighted rows [n, D] of one expert for x [n, D]."""


@dataclass(slots=True)
class WorkerReport:
    """What a worker did, for the table at the end of an answer."""

    name: str
    backend: str = ""
    device: str = ""
    numeric_class: str = ""
    experts: int = 0
    calls: int = 0
    rows: int = 0
    seconds: float = 0.0  #: computing
    state: str = "starting"
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Peer:
    """A worker's connections and what is known of it."""

    worker: LocalWorker
    report: WorkerReport
    calls_route: bytes | None = None
    weights_route: bytes | None = None
    to_load: set[int] = field(default_factory=set)  #: layers assigned and not ready


@dataclass(slots=True)
class _Open:
    """A ticket's batch until its rows are taken."""

    x: F32  # [T, D]
    out: F32  # [T, K, D]
    todo: list[ComputeLocally] = field(default_factory=list)


class Swarm:
    """Local workers over an encrypted socket. A context manager: leaving it ends every worker."""

    def __init__(
        self,
        model: Model,
        specs: Sequence[WorkerSpec],
        *,
        local: LocalRows,
        share_path: bool = True,
        placement: Place = place,
        deadline_s: float = CALL_DEADLINE_S,
        command: list[str] | None = None,
        on_progress: Progress = lambda what, done, total: None,
    ) -> None:
        self._model, self._local = model, local
        self._slices = SliceServer(model, share_path)
        self._dispatcher = Dispatcher(deadline_s=deadline_s)
        self._place, self._on_progress = placement, on_progress
        self._plan = Plan({}, {})
        self._open: dict[int, _Open] = {}
        self._ticket = 0
        self._epoch = 1
        self.local_calls = 0  #: calls computed here because no worker did
        self.dropped = 0  #: answers and messages that were not used
        self._gate = Gate("tcp://127.0.0.1:*")
        self._poller = zmq.Poller()
        self._poller.register(self._gate.socket, zmq.POLLIN)
        self._peers: dict[bytes, _Peer] = {}
        try:
            for number, spec in enumerate(specs, 1):
                self._start(f"local-{number}", spec, model.path if share_path else None, command)
            self._wait_until(lambda: all(p.calls_route is not None for p in self._peers.values()), "join")
            self._assign()
            self._wait_until(lambda: not any(p.to_load for p in self._peers.values()), "load their experts")
        except BaseException:
            self.close()
            raise

    # ---- ExpertSource

    def send(self, layer: int, x: F32, ids: I32) -> int:
        """Send a layer's rows x [T, D] to the holders of the experts ids [T, K]; a ticket comes back at once."""
        self._ticket += 1
        width = self._model.expert_width(layer)
        self._open[self._ticket] = _Open(x, np.empty((*ids.shape, width), np.float32))
        self._act(self._dispatcher.issued(self._ticket, layer, ids.tolist(), width, time.monotonic()))
        return self._ticket

    def ready(self, ticket: int) -> bool:
        """Whether all rows are here. Does not block."""
        self._pump(0)
        return self._dispatcher.done(ticket)

    def wait(self, ticket: int) -> F32:
        """The rows [T, K, D] of a ticket, each unweighted."""
        held = self._open[ticket]
        self._pump(0)
        while not self._dispatcher.done(ticket):
            if held.todo:
                self._compute(ticket, held)
            else:
                self._pump(self._patience_ms())
        self._dispatcher.forgotten(ticket)
        return self._open.pop(ticket).out

    def abandon(self) -> None:
        """Forget every open ticket: whoever asked has gone."""
        for ticket in list(self._open):
            self._dispatcher.forgotten(ticket)
            del self._open[ticket]

    # ---- what became of it

    def report(self) -> list[WorkerReport]:
        """One entry for each worker, in the order of their start."""
        return [peer.report for peer in self._peers.values()]

    def pids(self) -> list[int]:
        """Process ids of the workers, in the order of their start."""
        return [peer.worker.pid for peer in self._peers.values()]

    def classes(self) -> dict[tuple[int, int], str]:
        """(layer, expert) to the numeric class that the plan gave it to."""
        by_name = {peer.report.name: peer.report.numeric_class for peer in self._peers.values()}
        return {
            (layer, expert): by_name[name]
            for name, holds in self._plan.holds.items()
            for layer, experts in holds.items()
            for expert in experts
        }

    def close(self) -> None:
        """Let the workers go and end those that stay."""
        for peer in self._peers.values():
            if peer.calls_route is not None:
                self._send(peer.calls_route, Drain("the backbone is done"))
        for peer in self._peers.values():
            peer.worker.stop()
        self._gate.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- starting

    def _start(self, name: str, spec: WorkerSpec, path: Path | None, command: list[str] | None) -> None:
        gate = self._gate
        worker = start_worker(
            name, spec, endpoint=gate.endpoint, server_key=gate.public_key, model=path, command=command
        )
        gate.admit(worker.public_key)
        self._peers[worker.public_key] = _Peer(worker, WorkerReport(name))
        if worker.pidfd is not None:
            self._poller.register(worker.pidfd, zmq.POLLIN)

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + JOIN_TIMEOUT_S
        while not is_so():
            heard = self._pump(200)
            if heard:
                give_up = time.monotonic() + JOIN_TIMEOUT_S
            for peer in self._peers.values():
                if (code := peer.worker.ended()) is not None:
                    words = peer.worker.last_words() or f"exit code {code}"
                    raise BackboneError(f"worker {peer.report.name} ended before it could serve: {words}")
            if time.monotonic() > give_up:
                raise BackboneError(f"the workers did not {what} within {JOIN_TIMEOUT_S:g} s")

    def _assign(self) -> None:
        candidates = [
            Candidate(name=p.report.name, memory_bytes=p.worker.spec.memory_bytes) for p in self._peers.values()
        ]
        self._plan = plan = self._place(expert_bytes(self._model), candidates)
        if plan.describe():
            log.warning("%s", plan.describe())
        for peer in self._peers.values():
            holds = plan.holds.get(peer.report.name, {})
            peer.report.experts = sum(map(len, holds.values()))
            peer.to_load = set(holds)
            for layer, experts in holds.items():
                slices = self._slices.grant(peer.report.name, layer, experts)
                assign = Assign(self._epoch, layer, self._model.activation(layer), slices)
                if peer.calls_route is not None:
                    self._send(peer.calls_route, assign)
            self._dispatcher.joined(peer.report.name, self._epoch, holds)
            peer.report.state = "serving"

    # ---- messages

    def _patience_ms(self) -> int:
        deadline = self._dispatcher.next_deadline()
        return 1000 if deadline is None else max(0, min(1000, int((deadline - time.monotonic()) * 1000) + 1))

    def _pump(self, timeout_ms: int) -> bool:
        """Handle what has come, waiting at most so long for something to come; whether anything did."""
        heard = False
        while (received := self._gate.receive()) is not None:
            self._on_message(*received)
            heard = True
        if not heard and timeout_ms:
            events = dict(self._poller.poll(timeout_ms))
            while (received := self._gate.receive()) is not None:
                self._on_message(*received)
                heard = True
            self._watch(events)
        if (deadline := self._dispatcher.next_deadline()) is not None and time.monotonic() >= deadline:
            self._act(self._dispatcher.ticked(time.monotonic()))
        return heard

    def _watch(self, events: Mapping[Any, int]) -> None:
        for peer in self._peers.values():
            fd = peer.worker.pidfd
            if fd is not None and fd in events:
                self._poller.unregister(fd)
                self._lose(peer, peer.worker.last_words() or f"its process ended with code {peer.worker.ended()}")

    def _lose(self, peer: _Peer, reason: str) -> None:
        self._act(self._dispatcher.lost(peer.report.name, reason))

    def _on_message(self, key: bytes, route: bytes, frames: list[Any]) -> None:
        peer = self._peers.get(key)
        if peer is None:
            self.dropped += 1
            return
        try:
            message, tensors = decode_to_backbone([f.buffer for f in frames])
        except ProtocolError as error:
            self.dropped += 1
            if peer.calls_route == route:
                self._lose(peer, f"a message that cannot be read: {error}")
            return
        if isinstance(message, Rows) and route == peer.calls_route:
            self._on_rows(peer, message, tensors[0])
        elif isinstance(message, Hello):
            self._on_hello(peer, route, message)
        elif isinstance(message, Attach):
            peer.weights_route = route
        elif isinstance(message, Fetch) and route == peer.weights_route:
            self._on_fetch(peer, route, message)
        elif route == peer.calls_route:
            self._on_word(peer, message)
        else:
            self.dropped += 1

    def _on_rows(self, peer: _Peer, message: Rows, tensor: Tensor) -> None:
        rows = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
        is_finite = bool(np.isfinite(rows).all())
        report = peer.report
        actions = self._dispatcher.answered(report.name, message.seq, message.epoch, tensor.shape, is_finite=is_finite)
        for action in actions:
            if isinstance(action, Fill):
                self._fill(peer, action, rows, message.compute_ns)
            else:
                self._act([action])

    def _fill(self, peer: _Peer, action: Fill, rows: F32, compute_ns: int) -> None:
        call = action.call
        held = self._open[call.ticket]
        held.out[[p.row for p in call.pairs], [p.slot for p in call.pairs]] = rows
        peer.report.calls += 1
        peer.report.rows += len(rows)
        peer.report.seconds += compute_ns / 1e9

    def _on_hello(self, peer: _Peer, route: bytes, hello: Hello) -> None:
        kind, ours = hello.numeric_class, self._model.backend.numeric_class
        reason = _refusal(hello, ours)
        if reason:
            self._send(route, Refused(reason))
            peer.report.failures.append(reason)
            return
        peer.calls_route = route
        peer.report.backend, peer.report.device = hello.backend, hello.device
        peer.report.numeric_class = class_text(kind)
        self._send(route, Welcome(peer.report.name))

    def _on_fetch(self, peer: _Peer, route: bytes, fetch: Fetch) -> None:
        data = self._slices.read(peer.report.name, fetch)
        if data is None:
            self.dropped += 1
            log.warning("worker %s asked for weights that it was not assigned", peer.report.name)
            return
        tensor = Tensor(DType.U8, (len(data),), data)
        if not self._gate.send(route, encode(Chunk(fetch.sha256, fetch.offset), [tensor]), copy=False):
            self._lose(peer, "it does not take the weights that it asks for")

    def _on_word(self, peer: _Peer, message: Message) -> None:
        if isinstance(message, Ready):
            if message.epoch == self._epoch:
                peer.to_load.discard(message.layer)
                loaded = sum(not p.to_load for p in self._peers.values())
                self._on_progress("workers ready", loaded, len(self._peers))
        elif isinstance(message, Failed):
            if message.seq == 0:
                raise BackboneError(f"worker {peer.report.name} cannot load its experts: {message.reason}")
            self._act(self._dispatcher.failed(peer.report.name, message.seq, message.reason))
        elif isinstance(message, Goodbye):
            self._lose(peer, f"it left: {message.reason}")

    # ---- actions

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send_call(action)
            elif isinstance(action, ComputeLocally):
                if action.ticket in self._open:
                    self._open[action.ticket].todo.append(action)
            elif isinstance(action, Lost):
                self._forget(action)
            elif isinstance(action, Dropped):
                self.dropped += 1
                log.debug("worker %s: dropped %s", action.worker, action.reason)

    def _send_call(self, action: Send) -> None:
        call = action.call
        held, peer = self._open[call.ticket], self._peer(call.worker)
        rows, pairs = _distinct_rows(call.pairs)
        x = held.x if len(rows) == len(held.x) else held.x[rows]
        x = np.ascontiguousarray(x)
        tensors = [Tensor(DType.F32, x.shape, x.data), Tensor(DType.I32, pairs.shape, pairs.data)]
        frames = encode(Run(call.seq, call.epoch, call.layer), tensors)
        copy = x.nbytes < COPY_BELOW_BYTES
        if peer.calls_route is None or not self._gate.send(peer.calls_route, frames, copy=copy):
            self._lose(peer, "it takes no messages any more")

    def _compute(self, ticket: int, held: _Open) -> None:
        """Compute one action of a ticket's todo here."""
        action = held.todo.pop()
        by_expert: dict[int, list[Pair]] = {}
        for pair in action.pairs:
            by_expert.setdefault(pair.expert, []).append(pair)
        for expert, pairs in by_expert.items():
            rows = self._local.rows(action.layer, expert, held.x[[p.row for p in pairs]])
            held.out[[p.row for p in pairs], [p.slot for p in pairs]] = rows
        self.local_calls += 1
        self._dispatcher.computed(ticket, len(action.pairs))

    def _forget(self, lost: Lost) -> None:
        peer = self._peer(lost.worker)
        peer.report.state = "lost"
        peer.report.failures.append(lost.reason)
        log.warning("worker %s is lost: %s; its calls are computed here", lost.worker, lost.reason)

    def _peer(self, name: str) -> _Peer:
        return next(p for p in self._peers.values() if p.report.name == name)

    def _send(self, route: bytes, message: Message) -> bool:
        return self._gate.send(route, encode(message))


def class_text(kind: ClassInfo) -> str:
    """A numeric class in words, as tables and digests have it."""
    return f"{kind.name}/{kind.activations}/{kind.accumulation}"


def _refusal(hello: Hello, ours: NumericClass) -> str:
    """Why a worker is not accepted; empty when it is."""
    if hello.protocol != PROTOCOL_VERSION:
        return (
            f"it speaks protocol {hello.protocol} and the backbone {PROTOCOL_VERSION}; "
            "install the same version of expertswarm on both"
        )
    if class_text(hello.numeric_class) != str(ours) or hello.numeric_class.wire != "f32":
        return f"its numeric class is {class_text(hello.numeric_class)}, the backbone's {ours}: the bits would differ"
    return ""


def _distinct_rows(pairs: Sequence[Pair]) -> tuple[list[int], I32]:
    """The batch rows that pairs need, ascending, and (index of the row, expert) for each pair, [pairs, 2] int32."""
    rows = sorted({p.row for p in pairs})
    at = {row: i for i, row in enumerate(rows)}
    return rows, np.array([(at[p.row], p.expert) for p in pairs], np.int32)
