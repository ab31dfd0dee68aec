"""What stands before every endpoint: who may ask, under which name, how much; and a line of log for each request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .shapes import to_json

access_log = logging.getLogger("expertswarm.access")

MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 30.0
PRIVATE = "/private/"
OPEN = "/health"  #: for whoever watches the process, without a key
NOTES = "expertswarm.notes"  #: where in a scope its notes are


@dataclass(slots=True)
class Notes:
    """What the log says of a request beside its path. Never a word of what was asked or answered."""

    status: int = 0
    tokens: tuple[int, int] | None = None  #: of the prompt, of the answer


class Guard:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, *, token: str, api_key: str | None, hosts: Collection[str] | None) -> None:
        """`token` opens the private endpoints, `api_key` the others (None: they are open). `hosts` are the names under
        which this server may be asked (None: any), so that no page of the web can make its own name mean loopback.
        """
        self._app, self._hosts = app, hosts
        self._token, self._api_key = token.encode(), None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes, started = Notes(), time.perf_counter()
        scope[NOTES] = notes

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                notes.status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, note)
        except ApiError as error:
            await send_error(error, note)
        finally:
            access_log.info("%s", _line(scope, notes, time.perf_counter() - started))

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._hosts is not None and _host_name(headers.get("host", "")) not in self._hosts:
            message = f"this server is asked as {' or '.join(sorted(self._hosts))} only"
            raise ApiError(403, message, code="host_not_allowed")
        if path.startswith(PRIVATE):
            self._need(self._token, headers)
        elif self._api_key is not None and path != OPEN:
            self._need(self._api_key, headers)

    @staticmethod
    def _need(secret: bytes, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if not (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), secret)):
            message = "a valid API key is needed, as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", www_authenticate="Bearer")


def _host_name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower()


def _line(scope: Scope, notes: Notes, seconds: float) -> str:
    path = "".join(c if c.isprintable() and not c.isspace() else "?" for c in scope["path"][:200])
    tokens = "" if notes.tokens is None else f" {notes.tokens[0]}+{notes.tokens[1]} tokens"
    return f"{scope['method']} {path} {notes.status or 'hung up'}{tokens} {seconds:.3f} s"


async def send_error(error: ApiError, send: Send) -> None:
    """Answer with an error."""
    await send_json(error.body, send, status=error.status, headers=error.headers)


async def send_json(value: object, send: Send, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """Answer with one object."""
    await send_body(to_json(value), "application/json", send, status=status, headers=headers)


async def send_body(
    body: bytes, kind: str, send: Send, *, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Answer with a body."""
    found = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in found.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """A request's body of JSON. ApiError for another type, or one that is too large: it is not read to its end."""
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also a page of the web can send other types here without asking first.
        raise ApiError(415, "the body has to be sent as Content-Type: application/json", code="content_type")
    declared = headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > MAX_BODY_BYTES:
        raise too_large()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive)
    except TimeoutError:
        message = f"the body was not sent within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, code="body_too_slow", connection="close") from None


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HungUp
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise too_large()
        if not message.get("more_body", False):
            return bytes(body)


def too_large() -> ApiError:
    """The error for a body beyond the limit, after which the connection is of no more use."""
    message = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
    return ApiError(413, message, code="body_too_large", connection="close")


class HungUp(Exception):
    """The client has gone: there is nobody to answer."""


def notes_of(scope: Scope) -> Notes:
    """Where to note what the log shall say."""
    notes: Notes = scope[NOTES]
    return notes
