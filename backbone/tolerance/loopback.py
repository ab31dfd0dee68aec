"""JSON over HTTP with a server on this machine that is not ours: bounded in bytes and in time, no redirects."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from contextlib import closing, suppress
from threading import Event, Timer
from typing import Any
from urllib.parse import urlsplit

from ..errors import BackboneError, UsageError

MOST_BYTES = 1 << 26  #: of an answer: all log-probabilities of a vocabulary of 262,144 are some 30 MB
CONNECT_TIMEOUT_S = 10.0
MOST_MESSAGE = 200


class Loopback:
    """Asks one server, a connection for each request."""

    def __init__(self, place: str, url: str, *, timeout_s: float, most_bytes: int = MOST_BYTES) -> None:
        """UsageError for a URL that is not of this machine. `place` is what errors begin with."""
        self._place, self._timeout_s, self._most_bytes = place, timeout_s, most_bytes
        self.host, self.port = _address(place, url)

    def ask(self, method: str, path: str, body: Any = None, *, may_lack: bool = False) -> Any:
        """The JSON of an answer; None for 404 where that may be. BackboneError says what is wrong with it."""
        status, data = self._exchange(method, path, body)
        if status == 404 and may_lack:
            return None
        try:
            found = json.loads(data, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            found = None
        if 300 <= status < 400:
            raise BackboneError(f"{self._place}: {path} is elsewhere (status {status}); give the server's own address")
        if status != 200:
            raise BackboneError(f"{self._place}: {path} fails with status {status}{_message(found)}")
        if found is None:
            raise BackboneError(f"{self._place}: {path} answers what is no JSON; is this llama-server?")
        return found

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        late = Event()
        timeout = min(self._timeout_s, CONNECT_TIMEOUT_S)
        try:
            with closing(http.client.HTTPConnection(self.host, self.port, timeout=timeout)) as connection:
                connection.connect()
                connection.sock.settimeout(self._timeout_s)
                # A timeout of the socket is for each read of it: a server that drips would hold us for ever.
                timer = Timer(self._timeout_s, _hang_up, (connection.sock, late))
                timer.daemon = True
                timer.start()
                try:
                    connection.request(method, path, data, {"Content-Type": "application/json", "Connection": "close"})
                    with connection.getresponse() as response:
                        found = self._read(response, path)
                finally:
                    timer.cancel()
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise self._too_late(path) from None
            raise BackboneError(f"{self._place}: {path} is not answered: {error or type(error).__name__}") from None
        if late.is_set():  # what was read so far looks like a whole answer where the server names no length
            raise self._too_late(path)
        return response.status, found

    def _read(self, response: http.client.HTTPResponse, path: str) -> bytes:
        expected = response.length  # None where the server names none and hangs up at the end
        found = b"" if (expected or 0) > self._most_bytes else response.read(self._most_bytes + 1)
        if max(expected or 0, len(found)) > self._most_bytes:
            raise BackboneError(f"{self._place}: {path} answers with more than {self._most_bytes} bytes")
        if expected is not None and len(found) < expected:  # a read of so many bytes does not say so itself
            raise http.client.IncompleteRead(found, expected - len(found))
        return found

    def _too_late(self, path: str) -> BackboneError:
        return BackboneError(
            f"{self._place}: {path} took more than {self._timeout_s:g} s; allow more with /timeout=SECONDS"
        )


def _address(place: str, url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from None
    if parts.scheme != "http" or not host or parts.username is not None or parts.path or parts.query or parts.fragment:
        raise UsageError(f"{place}: is not http://HOST:PORT")
    if host == "localhost":  # as it is everywhere, whatever a resolver says
        host = "127.0.0.1"
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        raise UsageError(f"{place}: {host[:60]} is not this machine; give http://127.0.0.1:PORT")
    return host, 80 if port is None else port


def _hang_up(sock: socket.socket, late: Event) -> None:
    late.set()
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _message(found: Any) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return f": {one_line(text)}" if isinstance(text, str) else ""


def one_line(text: str) -> str:
    """What another's text says, fit for a line of ours."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_MESSAGE])
