"""The server's process: its socket, its signals, its end; uvicorn does the HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import UsageError
from ..listening import Address

DRAIN_S = 3.0  #: that answers may still take once the process is to end
CLOSE_S = 3.0  #: more, for their last words to go out
HEAD_S = 10.0  #: for a connection's first request, or another one that has begun, until its head is here
REQUEST_S = 40.0  #: for the rest of it; whoever reads a body has said before that it is too slow
STALL_S = 60.0  #: for a client that does not take what it is sent
MOST_CONNECTIONS = 512  #: more are hung up
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def bind(address: Address) -> socket.socket:
    """A listening socket. UsageError when it cannot be had."""
    try:
        (family, kind, protocol, _, found), *_ = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--http {address}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(f"--http {address}: cannot listen there: {error.strerror}") from None
    return listener


class PatientProtocol(H11Protocol):
    """HTTP for clients that may be slow, but not for ever: each connection holds a descriptor, perhaps a turn."""

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _has_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._wait(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """Part of a request came."""
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.SEND_BODY and not self._has_head:
            self._has_head = True
            self._wait(REQUEST_S)
        elif state is h11.IDLE and self._timer is None:
            self._has_head = False
            self._wait(HEAD_S)
        elif state not in (h11.IDLE, h11.SEND_BODY):  # the request is whole
            self._has_head = False
            self._wait(None)

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        self._take()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._wait(None)
        self._take()
        super().connection_lost(exc)

    def _take(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _wait(self, seconds: float | None) -> None:
        """Hang up after so long, in place of when it was to be before; None: do not."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class _Server(uvicorn.Server):
    """Tells when it answers, and lets answers end when the process is to."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready, self._on_end = on_ready, on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more; what is under way has some time to end by itself, then is ended."""
        timer = asyncio.get_running_loop().call_later(DRAIN_S, self._on_end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first is a request to end, a second one hurries."""
        if self.should_exit:
            self._on_end()
        super().handle_exit(sig, frame)


def serve(app: ASGIApp, listener: socket.socket, *, on_ready: Callable[[], None], on_end: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` is called once requests are answered, `on_end` to break answers off."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        http=PatientProtocol,
        ws="none",
        loop="asyncio",
        proxy_headers=False,
        timeout_graceful_shutdown=int(DRAIN_S + CLOSE_S),
    )
    # uvicorn raises the signals that it took again when it is done, for whoever had them before: that is us.
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        _Server(config, on_ready, on_end).run([listener])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
