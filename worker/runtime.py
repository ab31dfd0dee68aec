"""The worker's loop: sockets, store and backend around the state machine, which decides.

Calls come first: a chunk of weights is looked at only when no call waits.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq

from kernels.gguf import open_gguf
from kernels.interface import Backend
from protocol import PROTOCOL_VERSION
from protocol.capabilities import WIRE_DTYPES, ClassInfo
from protocol.errors import ProtocolError
from protocol.frames import DType, Tensor, decode_to_worker
from protocol.messages import Assign, Attach, Chunk, Drain, Failed, Hello, Refused, Rows, Run, Welcome
from protocol.schema import one_line

from . import state as does
from .connection import Connection
from .errors import WorkerError
from .experts import ExpertStore, slice_bytes
from .progress import ProgressBar
from .session import Session
from .state import Action, Phase, WorkerState

log = logging.getLogger(__name__)

TICK_MS = 1000


class Runtime:
    """One worker's life, from connecting to leaving."""

    def __init__(self, session: Session, backend: Backend, *, build: str) -> None:
        self._backend, self._build = backend, build
        path = session.model_path
        self._file = open_gguf(path) if path else None
        self._store = ExpertStore(backend, self._file)
        bounds = [bound for bound in (session.memory_bytes, backend.memory_bytes) if bound]
        self._state = WorkerState(memory_bytes=min(bounds, default=0), has_file=path is not None)
        self._progress = ProgressBar(sys.stderr, "experts", is_quiet=session.quiet)
        self._tensors: tuple[Tensor, ...] = ()  #: of the message that is being handled
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._calls, self._weights = Connection(self._context, session), Connection(self._context, session)

    def close(self) -> None:
        """Close every socket and the file."""
        self._calls.close()
        self._weights.close()
        self._context.term()
        if self._file is not None:
            self._file.close()

    def run(self) -> None:
        """Serve until the backbone lets go. WorkerError when it refuses or cannot be reached."""
        calls, weights = self._calls, self._weights
        poller = zmq.Poller()
        for source in (calls.socket, weights.socket, calls.monitor, weights.monitor):
            poller.register(source, zmq.POLLIN)
        while self._state.phase is not Phase.ENDED:
            events = dict(poller.poll(TICK_MS))
            if calls.socket in events:
                self._hear(calls.receive())
            elif weights.socket in events:
                self._hear(weights.receive())
            if calls.monitor in events and calls.is_up():
                self._act(self._state.calls_connected())
            if weights.monitor in events and weights.is_up():
                self._act(self._state.weights_connected())
            if self._state.phase is Phase.CONNECTING:
                self._act(self._state.ticked(time.monotonic()))

    # ---- messages

    def _hear(self, frames: Sequence[Any]) -> None:
        try:
            message, self._tensors = decode_to_worker(frames)
        except ProtocolError as error:
            log.warning("refused a message of the backbone's: %s", error)
            return
        if isinstance(message, Run):
            self._act(self._state.asked(message))
        elif isinstance(message, Chunk):
            self._act(self._state.chunk_came(message.sha256, message.offset, self._tensors[0].shape[0]))
        elif isinstance(message, Assign):
            self._on_assign(message)
        elif isinstance(message, Welcome):
            self._act(self._state.welcomed(message))
        elif isinstance(message, Refused):
            self._act(self._state.refused(message))
        elif isinstance(message, Drain):
            self._act(self._state.drained(message))

    def _on_assign(self, assign: Assign) -> None:
        try:
            sizes = [slice_bytes(piece) for piece in assign.slices]
        except WorkerError as error:
            self._act(self._state.not_loaded(assign, str(error)))
        else:
            self._act(self._state.assigned(assign, sizes))

    # ---- actions

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case does.Compute():
                    self._compute(action.run)
                case does.Send():
                    self._calls.send(action.message)
                case does.SendFetch():
                    self._weights.send(action.message)
                case does.Store():
                    self._store_chunk(action)
                case does.Progress():
                    self._progress.show(action.bytes_done, action.bytes_total)
                case does.Load():
                    self._load(action.assign)
                case does.Keep():
                    self._store.keep(action.slices, action.layer)
                case does.SendHello():
                    self._calls.send(self._hello())
                case does.SendAttach():
                    self._weights.send(Attach(PROTOCOL_VERSION))
                case does.Ignored():
                    log.warning("ignored: %s", action.reason)
                case does.End():
                    if action.reason:
                        raise WorkerError(action.reason)

    def _hello(self) -> Hello:
        backend, numeric = self._backend, self._backend.numeric_class
        kind = ClassInfo(one_line(numeric.name), numeric.accumulation, numeric.activations)
        device, memory = one_line(backend.device), self._state.memory_bytes
        cached = self._state.cached()
        return Hello(PROTOCOL_VERSION, self._build, backend.name, device, kind, WIRE_DTYPES, memory, cached)

    def _compute(self, run: Run) -> None:
        try:
            x, pairs = self._tensors
            rows, compute_ns = self._store.layer(run.layer).rows(
                np.frombuffer(x.data, "<f4").reshape(x.shape),
                np.frombuffer(pairs.data, "<i4").reshape(pairs.shape),
            )
        except Exception as error:  # whatever a device or its driver does: the call fails, the worker goes on
            self._calls.send(Failed(run.seq, run.epoch, one_line(str(error) or type(error).__name__)))
            return
        if not self._calls.send(Rows(run.seq, run.epoch, compute_ns), [Tensor(DType.F32, rows.shape, rows)]):
            log.warning("the backbone takes no answers; that of call %d is dropped", run.seq)

    def _store_chunk(self, store: does.Store) -> None:
        data = np.frombuffer(self._tensors[0].data, np.uint8)
        is_right = self._store.add_chunk(store.sha256, store.size, store.offset, data)
        if is_right is not None:
            found = self._state.slice_right if is_right else self._state.slice_wrong
            self._act(found(store.sha256))

    def _load(self, assign: Assign) -> None:
        try:
            self._store.load(assign)
        except WorkerError as error:
            self._act(self._state.not_loaded(assign, str(error)))
        else:
            self._act(self._state.loaded(assign))
