"""A TCP relay between a worker and its backbone, which can go silent without closing: connections are then half-open."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType

CHUNK_BYTES = 1 << 16


class Relay:
    """Listens on a port of its own and forwards to another of this machine, in a thread, until the block ends."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._others: dict[socket.socket, socket.socket] = {}
        self._forwards = threading.Event()
        self._forwards.set()
        self._silenced: dict[socket.socket, socket.socket] = {}
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_silent(self) -> None:
        """Forward nothing any more; neither end is told."""
        self._forwards.clear()

    def forward(self) -> None:
        """Forward what is connected from now on. What was connected before stays silent for ever."""
        for one in self._others:
            self._selector.unregister(one)
        self._silenced, self._others = self._others, {}
        self._forwards.set()

    def _run(self) -> None:
        while not self._is_ending:
            events = self._selector.select(0.05)
            self._forwards.wait()
            for key, _ in events:
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._listener:
                    self._connect()
                elif one in self._others:
                    self._pass_on(one)

    def _connect(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._others |= {near: far, far: near}
        for one in (near, far):
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, one: socket.socket) -> None:
        other = self._others[one]
        try:
            data = one.recv(CHUNK_BYTES)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for each in (one, other):
                self._selector.unregister(each)
                del self._others[each]
                each.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_ending = True
        self._forwards.set()
        self._thread.join()
        for each in (self._listener, *self._others, *self._silenced):
            with contextlib.suppress(OSError):
                each.close()
        self._selector.close()
