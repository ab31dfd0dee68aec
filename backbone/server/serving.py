"""The server's process: its socket, its signals, its end; uvicorn does the HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ..errors import UsageError
from ..listening import Address

DRAIN_S = 3.0  #: that answers may still take once the process is to end
CLOSE_S = 3.0  #: more, for their last words to go out
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
        http="h11",
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
