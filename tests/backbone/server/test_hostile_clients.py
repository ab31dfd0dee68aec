"""HTTP clients that mean ill: what they send is bounded in size, depth and time, and nothing they name is opened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn
from server_kit import Server

from backbone.server import serving
from backbone.server.requests import MOST_STOP_CHARACTERS

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BOMBS = (b'{"prompt": ' + b"[" * 1_000_000, b'{"prompt": ' + b'{"a":' * 500_000, b'{"seed": ' + b"9" * 1_000_000 + b"}")


def exchange(server: Server, data: bytes) -> bytes:
    """What a server answers to bytes, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        found = b""
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
            while part := client.recv(65536):
                found += part
        return found


@pytest.mark.parametrize("body", BOMBS, ids=["lists", "maps", "digits"])
def test_json_that_is_a_bomb(server: Server, body: bytes) -> None:
    status, _, data = server.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert (status, json.loads(data)["error"]["code"]) == (400, "invalid_json")
    assert server.get("/health") == {"status": "ok"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": "{{ 1 }}"}, "template"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["a"] * 100_000}, "stop"),
        ({"stop": "a" * (MOST_STOP_CHARACTERS + 1)}, "stop"),
        ({"archdef": "/etc/passwd"}, "archdef"),
        ({"backend": "native"}, "backend"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "/etc/passwd"}}]}]},
         "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_nothing_that_a_request_names_is_opened_or_run(server: Server, fields: dict[str, Any], param: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    status, found = server.post("/v1/chat/completions", chat | fields)
    assert (status, found["error"]["param"]) == (400, param)


def test_a_head_without_end_is_refused(server: Server) -> None:
    assert exchange(server, HEAD + b"X-More: " + b"x" * (1 << 20)).startswith(b"HTTP/1.1 400 ")
    assert exchange(server, HEAD + b"".join(b"X-%d: x\r\n" % i for i in range(100_000))).startswith(b"HTTP/1.1 400 ")
    assert server.get("/health") == {"status": "ok"}


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"Content-Length: +4\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Content-Length : 4\r\n",
    ],
)
def test_requests_that_two_readers_would_cut_differently(server: Server, lines: bytes) -> None:
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    found = exchange(server, HEAD + b"Connection: close\r\n" + lines + b"\r\n" + b"0\r\n\r\n" + smuggled)
    assert b"HTTP/1.1 200" not in found


# ---- slow ones


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    """A long answer, for who takes it."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(10_000 if scope["path"] == "/long" else 1):
        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def with_server(work: Callable[[int, uvicorn.Server], Coroutine[Any, Any, None]]) -> None:
    """Run something beside a server of our protocol."""

    async def run() -> None:
        config = uvicorn.Config(_answer, port=0, lifespan="off", log_config=None, http=serving.PatientProtocol)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(server.serve([listener]))
            try:
                await asyncio.wait_for(work(listener.getsockname()[1], server), 60)
            finally:
                server.should_exit = True
                await task

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limit", "start"),
    [
        ("HEAD_S", b""),
        ("HEAD_S", b"GET / HT"),
        ("REQUEST_S", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc"),
    ],
    ids=["silent", "head", "body"],
)
def test_a_request_that_never_ends_is_hung_up(monkeypatch: pytest.MonkeyPatch, limit: str, start: bytes) -> None:
    monkeypatch.setattr(serving, limit, 0.05)

    async def work(port: int, server: uvicorn.Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            await reader.read()  # up to the end, which it has
        writer.close()

    with_server(work)


def test_one_that_takes_nothing_is_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STALL_S", 0.05)

    async def work(port: int, server: uvicorn.Server) -> None:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
            while not server.server_state.connections:
                await asyncio.sleep(0)
            while server.server_state.connections:  # nobody reads, so that this is its end
                await asyncio.sleep(0)

    with_server(work)


def test_there_may_be_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 2)

    async def work(port: int, server: uvicorn.Server) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        while len(server.server_state.connections) < 2:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        for _, each in (*held, (reader, writer)):
            each.close()

    with_server(work)
