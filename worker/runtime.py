"""The worker's loop: sockets, store and backend around the state machine, which decides.

Calls come first: a chunk of weights is looked at only when no call waits.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from kernels.gguf import open_gguf
from kernels.half import packed, unpacked
from kernels.interface import Backend
from protocol import PROTOCOL_VERSION
from protocol.capabilities import WIRE_DTYPES, ClassInfo
from protocol.errors import ProtocolError
from protocol.frames import Tensor, decode_to_worker
from protocol.messages import Assign, Attach, Chunk, Drain, Failed, Hello, Refused, Rows, Run, Welcome
from protocol.repeats import Repeats
from protocol.schema import one_line

from . import actions as does
from .actions import Action
from .activity import Activity
from .arrivals import Stored
from .cache import SliceCache
from .connection import Connection
from .errors import Break, LinkBroken, WorkerError
from .experts import ExpertStore, slice_bytes
from .progress import ProgressBar
from .session import Session
from .state import Phase, WorkerState
from .stopping import Stop

log = logging.getLogger(__name__)

TICK_MS = 1000
CHUNKS_AT_ONCE = 4  #: that are taken before it is looked whether there is anything else to do


MOST_CACHED = 1 << 14  #: slices that HELLO may name


class Runtime:
    """One worker's life, from connecting to leaving; a joined worker's has many sessions.

    A joined worker takes no slice on trust: it wants the sha256 of each, also where it has a model file.
    """

    def __init__(
        self,
        session: Session,
        backend: Backend,
        *,
        build: str,
        cache: SliceCache | None = None,
        is_joined: bool = False,
        stop: Stop | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._session, self._backend, self._build, self._stop, self._say = session, backend, build, stop, say
        path = session.model_path
        self._file = open_gguf(path) if path else None
        self._store = ExpertStore(backend, self._file, cache)
        bounds = [bound for bound in (session.memory_bytes, backend.memory_bytes) if bound]
        has_file = path is not None and not is_joined
        self._state = WorkerState(memory_bytes=min(bounds, default=0), has_file=has_file)
        self._progress = ProgressBar(sys.stderr, "experts", is_quiet=session.quiet)
        self._tensors: tuple[Tensor, ...] = ()  #: of the message that is being handled
        self._said: int | None = None  #: experts held, when it was last said
        self.activity = Activity()
        self._repeats = Repeats()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._calls: Connection
        self._weights: Connection

    @property
    def name(self) -> str:
        """The name that the backbone knows this worker by; empty before it said so."""
        return self._state.name

    def close(self) -> None:
        """Let go of everything."""
        self._context.term()
        self._store.close()
        if self._file is not None:
            self._file.close()

    def run(self) -> None:
        """Serve until the backbone lets go. WorkerError when it refuses or cannot be reached."""
        self._serve(self._session, lasts=True)

    def serve(self, session: Session, on_welcome: Callable[[], None]) -> None:
        """Serve one backbone process until it lets go, or somebody here wants an end. LinkBroken when it is gone."""
        self._act(self._state.session_began())
        self._said = None
        try:
            self._serve(session, lasts=False, on_welcome=on_welcome)
        finally:
            self.activity.is_serving, self.activity.experts = False, 0

    def _serve(self, session: Session, *, lasts: bool, on_welcome: Callable[[], None] = lambda: None) -> None:
        self._calls = Connection(self._context, session, lasts=lasts)
        self._weights = Connection(self._context, session, lasts=lasts)
        try:
            self._loop(on_welcome)
        finally:
            self._calls.close()
            self._weights.close()

    def _loop(self, on_welcome: Callable[[], None]) -> None:
        calls, weights, store = self._calls, self._weights, self._store
        poller = zmq.Poller()
        for source in (calls.socket, weights.socket, calls.monitor, weights.monitor, store.wake):
            poller.register(source, zmq.POLLIN)
        if self._stop is not None:
            poller.register(self._stop.fd, zmq.POLLIN)
        was_welcome = False
        while self._state.phase is not Phase.ENDED:
            events = dict(poller.poll(TICK_MS))
            if calls.socket in events:
                self._hear(calls.receive())
            elif weights.socket in events:
                self._hear_chunks()
            if store.wake in events:
                self._collect()
            if calls.monitor in events and calls.is_up():
                self._act(self._state.calls_connected())
            if weights.monitor in events and weights.is_up():
                self._act(self._state.weights_connected())
            if self._state.phase is Phase.CONNECTING:
                self._act(self._state.ticked(time.monotonic()))
            elif not was_welcome:
                was_welcome = self.activity.is_serving = True
                on_welcome()
            if self._stop is not None and self._stop.fd in events:
                self._act(self._state.stopped())
            if not events:
                self._say_held()

    def _say_held(self) -> None:
        """Say how many experts are held, when there is nothing else to do."""
        held = self._state.experts_held()
        if held and held != self._said:
            self._said = held
            self._say(f"serving {held} experts")

    # ---- messages

    def _hear_chunks(self) -> None:
        """Take the chunks that have come, as long as no call waits."""
        for _ in range(CHUNKS_AT_ONCE):
            self._hear(self._weights.receive())
            if self._calls.has_message() or not self._weights.has_message():
                return

    def _hear(self, frames: Sequence[Any]) -> None:
        try:
            message, self._tensors = decode_to_worker(frames)
        except ProtocolError as error:
            self._warn("refused a message of the backbone's", str(error))
            return
        if isinstance(message, Run):
            self._act(self._state.asked(message))
        elif isinstance(message, Chunk):
            length, now_s = self._tensors[0].shape[0], time.monotonic()
            self._act(self._state.chunk_came(message.sha256, message.offset, length, now_s))
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
            here = [self._store.here(*each) if each[0].sha256 else 0 for each in zip(assign.slices, sizes, strict=True)]
        except WorkerError as error:
            self._act(self._state.not_loaded(assign, str(error)))
        else:
            self._act(self._state.assigned(assign, sizes, here))

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
                case does.Check():
                    self._store.check(action.piece, action.size)
                case does.Progress():
                    self._progress.show(action.bytes_done, action.bytes_total)
                case does.Load():
                    self._load(action.assign)
                case does.Keep():
                    self._store.keep(action.slices, action.layer)
                case does.SendHello():
                    self._calls.send(self.hello())
                case does.SendAttach():
                    self._weights.send(Attach(PROTOCOL_VERSION))
                case does.Ignored():
                    self._warn("ignored", action.reason)
                case does.End():
                    if action.may_retry and self._stop is not None:
                        raise LinkBroken(Break.SILENT)
                    if action.reason:
                        raise WorkerError(action.reason)

    def hello(self) -> Hello:
        """What this worker is, with the slices that it has now."""
        backend, numeric = self._backend, self._backend.numeric_class
        kind = ClassInfo(one_line(numeric.name), numeric.accumulation, numeric.activations)
        device, memory = one_line(backend.device), self._state.memory_bytes
        cached = self._store.cached(MOST_CACHED)
        return Hello(PROTOCOL_VERSION, self._build, backend.name, device, kind, WIRE_DTYPES, memory, cached)

    def _compute(self, run: Run) -> None:
        try:
            x, pairs = self._tensors
            rows, compute_ns = self._store.layer(run.layer).rows(
                unpacked(x.data, x.shape, x.dtype.value), np.frombuffer(pairs.data, "<i4").reshape(pairs.shape)
            )
        except Exception as error:  # whatever a device or its driver does: the call fails, the worker goes on
            reason = self.activity.last_error = one_line(str(error) or type(error).__name__)
            self._calls.send(Failed(run.seq, run.epoch, reason))
            return
        self.activity.calls += 1
        carried = packed(rows, x.dtype.value)
        if not self._calls.send(Rows(run.seq, run.epoch, compute_ns), [Tensor(x.dtype, carried.shape, carried)]):
            self._warn("the backbone takes no answers", f"that of call {run.seq} is dropped")

    def _warn(self, what: str, of: str) -> None:
        if (tail := self._repeats.tail(what, time.monotonic())) is not None:
            log.warning("%s: %s%s", what, of, tail)

    def _store_chunk(self, store: does.Store) -> None:
        data = np.frombuffer(self._tensors[0].data, np.uint8)
        self._store.add_chunk(store.sha256, store.size, store.offset, data)

    def _collect(self) -> None:
        for result in self._store.results():
            if isinstance(result, Stored):
                self._act(self._state.chunk_stored(result.nbytes))
            else:
                is_right = result.data is not None
                self._act((self._state.slice_right if is_right else self._state.slice_wrong)(result.sha256))

    def _load(self, assign: Assign) -> None:
        try:
            self._store.load(assign)
        except WorkerError as error:
            self.activity.last_error = str(error)
            self._act(self._state.not_loaded(assign, str(error)))
        else:
            self._act(self._state.loaded(assign))
            if (held := self._state.experts_held()) is not None:
                self.activity.experts = held
