"""The worker's sockets and its loop: one connection for calls, one for weights, and standard input, whose end is ours.

Calls come first: a chunk of weights is looked at only when no call waits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from kernels.errors import KernelError
from kernels.gguf import open_gguf
from kernels.interface import Backend
from protocol import PROTOCOL_VERSION
from protocol.errors import ProtocolError
from protocol.frames import DType, Tensor, decode_to_worker, encode
from protocol.messages import (
    CHUNK_BYTES,
    Assign,
    Attach,
    Chunk,
    ClassInfo,
    Drain,
    Failed,
    Goodbye,
    Hello,
    Message,
    Refused,
    Rows,
    Run,
    Welcome,
)

from .errors import WorkerError
from .experts import ExpertStore
from .progress import Progress
from .session import Session
from .state import Action, Complete, End, Phase, SendFetch, WorkerState
from .state import Progress as ProgressMade

WELCOME_TIMEOUT_S = 60.0
COPY_BELOW_BYTES = 64 * 1024  #: below this ZeroMQ's own copy is cheaper than keeping ours alive
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def _dealer(context: zmq.Context[zmq.Socket[bytes]], session: Session) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = session.server_key.encode()
    socket.curve_publickey = session.public_key.encode()
    socket.curve_secretkey = session.secret_key.encode()
    socket.linger = 0
    socket.maxmsgsize = 1 << 28
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = 1000, 5000, 5000
    socket.handshake_ivl = 10_000
    socket.connect(session.endpoint)
    return socket


class Runtime:
    """One worker's life, from connecting to leaving."""

    def __init__(self, session: Session, backend: Backend, *, build: str, stdin: int) -> None:
        self._backend, self._build, self._stdin = backend, build, stdin
        path = session.model_path
        self._store = ExpertStore(memory_bytes=session.memory_bytes, file=open_gguf(path) if path else None)
        self._memory_bytes = session.memory_bytes
        self._state = WorkerState()
        self._progress = Progress(sys.stderr, "experts")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._calls = _dealer(self._context, session)
        self._weights = _dealer(self._context, session)
        self._monitor = self._calls.get_monitor_socket(_HANDSHAKE_FAILURES)

    def close(self) -> None:
        """Close every socket."""
        self._calls.disable_monitor()
        self._context.destroy(linger=200)

    def run(self) -> None:
        """Serve until the backbone lets go or is gone. WorkerError when it refuses or cannot be reached."""
        self._send(self._calls, self._hello())
        self._send(self._weights, Attach(PROTOCOL_VERSION))
        poller = zmq.Poller()
        for source in (self._calls, self._weights, self._monitor, self._stdin):
            poller.register(source, zmq.POLLIN)
        give_up = time.monotonic() + WELCOME_TIMEOUT_S
        while self._state.phase is not Phase.ENDED:
            events = dict(poller.poll(1000))
            if self._stdin in events:
                return  # the backbone is gone; nobody is left to tell
            if self._monitor in events:
                self._handshake_failed()
            if self._calls in events:
                self._drain_calls()
            elif self._weights in events:
                self._on_weights(self._weights.recv_multipart(copy=False))
            if self._state.phase is Phase.CONNECTING and time.monotonic() > give_up:
                raise WorkerError(f"no answer from the backbone within {WELCOME_TIMEOUT_S:g} s")

    def _hello(self) -> Hello:
        numeric = self._backend.numeric_class
        kind = ClassInfo(numeric.name, numeric.accumulation, numeric.activations, "f32")
        backend = self._backend
        return Hello(PROTOCOL_VERSION, self._build, backend.name, backend.device, kind, self._memory_bytes)

    def _handshake_failed(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise WorkerError("the backbone does not know this worker's key; it is not of this run")
        raise WorkerError("no CURVE handshake with the backbone: another program answers there")

    @staticmethod
    def _send(socket: zmq.Socket[bytes], message: Message, tensors: Sequence[Tensor] = ()) -> None:
        frames = encode(message, tensors)
        copy = sum(len(memoryview(f).cast("B")) for f in frames[1:]) < COPY_BELOW_BYTES
        socket.send_multipart(frames, copy=copy)

    def _drain_calls(self) -> None:
        while self._state.phase is not Phase.ENDED:
            try:
                frames = self._calls.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._on_call(frames)

    def _on_call(self, frames: list[Any]) -> None:
        try:
            message, tensors = decode_to_worker([f.buffer for f in frames])
        except ProtocolError as error:
            print(f"refused a message of the backbone's: {error}", file=sys.stderr, flush=True)
            return
        if isinstance(message, Run):
            self._compute(message, *tensors)
        elif isinstance(message, Assign):
            self._assign(message)
        elif isinstance(message, Welcome):
            self._act(self._state.welcomed(message))
        elif isinstance(message, Refused):
            self._act(self._state.refused(message))
        elif isinstance(message, Drain):
            self._send(self._calls, Goodbye("drained"))
            self._act(self._state.drained())

    def _compute(self, run: Run, x: Tensor, pairs: Tensor) -> None:
        try:
            rows, seconds = self._rows(run, x, pairs)
        except WorkerError as error:
            self._send(self._calls, Failed(run.seq, run.epoch, str(error)))
            return
        tensor = Tensor(DType.F32, rows.shape, rows.data)
        self._send(self._calls, Rows(run.seq, run.epoch, int(seconds * 1e9)), [tensor])

    def _rows(self, run: Run, x: Tensor, pairs: Tensor) -> tuple[Any, float]:
        """The unweighted rows [pairs, width] float32, and the seconds they took."""
        started = time.perf_counter()
        experts = self._store.find(run.epoch, run.layer)
        inputs = np.frombuffer(x.data, "<f4").reshape(x.shape)
        listed = np.frombuffer(pairs.data, "<i4").reshape(pairs.shape)
        if listed.shape[1] != 2 or listed[:, 0].min() < 0 or listed[:, 0].max() >= len(inputs):
            raise WorkerError(f"pairs {listed.shape} do not fit {len(inputs)} rows")
        out = None
        for expert in np.unique(listed[:, 1]).tolist():
            weights = experts.get(expert)
            if weights is None:
                raise WorkerError(f"expert {expert} of layer {run.layer} is not held here")
            if weights.gate.cols != inputs.shape[1]:
                raise WorkerError(f"rows of {inputs.shape[1]} values for experts that take {weights.gate.cols}")
            at = np.flatnonzero(listed[:, 1] == expert)
            rows = self._backend.expert_rows(weights, inputs[listed[at, 0]])
            if out is None:
                out = np.empty((len(listed), rows.shape[1]), np.float32)
            out[at] = rows
        return out, time.perf_counter() - started

    def _assign(self, assign: Assign) -> None:
        try:
            self._act(self._state.assigned(assign, self._store.missing(assign)))
        except (WorkerError, KernelError) as error:
            self._send(self._calls, Failed(0, assign.epoch, str(error)))

    def _on_weights(self, frames: list[Any]) -> None:
        try:
            message, tensors = decode_to_worker([f.buffer for f in frames])
        except ProtocolError as error:
            print(f"refused weights of the backbone's: {error}", file=sys.stderr, flush=True)
            return
        if not isinstance(message, Chunk):
            return
        size = self._state.size_of(message.sha256, message.offset)
        data = np.frombuffer(tensors[0].data, np.uint8)
        if size is None or len(data) != min(CHUNK_BYTES, size - message.offset):
            print("refused a chunk of weights that was not asked for", file=sys.stderr, flush=True)
            return
        try:
            is_whole = self._store.add_chunk(message.sha256, size, message.offset, data)
        except WorkerError as error:
            self._act(self._state.slice_wrong(message.sha256, message.offset, len(data), str(error)))
        else:
            self._act(self._state.chunk_stored(message.sha256, message.offset, len(data), is_whole=is_whole))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SendFetch):
                self._send(self._weights, action.message)
            elif isinstance(action, Complete):
                self._complete(action)
            elif isinstance(action, ProgressMade):
                self._progress.show(action.bytes_done, action.bytes_total)
            elif isinstance(action, End) and action.reason:
                raise WorkerError(action.reason)

    def _complete(self, action: Complete) -> None:
        try:
            self._store.complete(action.assign)
        except (WorkerError, KernelError) as error:
            self._send(self._calls, Failed(0, action.assign.epoch, str(error)))
        else:
            self._send(self._calls, action.ready)
