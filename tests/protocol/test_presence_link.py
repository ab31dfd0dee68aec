"""The connection to a broker, with a client that plays one: what is said, again after a break, and never in the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.presence_link import Link

PATIENCE_S = 30.0


class Played:
    """A broker: what it was told, and how its connections go. `answers` holds an error for each that fails."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.held: list[tuple[int, str, bytes]] = []  # (connection, topic, payload)
        self.lines: list[str] = []
        self.connections = 0
        self.left: list[str] = []
        self.news = threading.Condition()
        self.client: PlayedClient | None = None

    def connect(self) -> AbstractAsyncContextManager[Any]:
        return self._connect()

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        self.connections += 1
        error = self.answers.pop(0) if self.answers else None
        if error is not None:
            raise error
        self.client = PlayedClient(self, self.connections)
        try:
            yield self.client
        except Exception:
            self.left.append("broken")
            raise
        self.left.append("clean")

    def say(self, line: str) -> None:
        with self.news:
            self.lines.append(line)
            self.news.notify_all()

    def until(self, is_so: Callable[[], Any]) -> None:
        with self.news:
            assert self.news.wait_for(is_so, PATIENCE_S), (self.held, self.lines)


class PlayedClient:
    def __init__(self, broker: Played, number: int) -> None:
        self.broker, self.number, self.loop = broker, number, asyncio.get_running_loop()
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.subscribed: list[str] = []

    async def subscribe(self, topic: str, qos: int) -> None:
        assert qos == 1
        self.subscribed.append(topic)

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        assert (qos, retain) == (1, True)
        with self.broker.news:
            self.broker.held.append((self.number, topic, payload))
            self.broker.news.notify_all()

    def push(self, item: Any) -> None:
        self.loop.call_soon_threadsafe(self.queue.put_nowait, item)

    @property
    async def messages(self) -> AsyncIterator[Any]:
        while True:
            item = await self.queue.get()
            if isinstance(item, Exception):
                raise item
            yield item


def link_to(broker: Played, **given: Any) -> Link:
    return Link(broker.connect, place="here", topics=["t/+"], say=broker.say, **{"on_message": print, **given})


def test_states_go_out_once_each_and_all_again_after_a_break() -> None:
    broker = Played()
    link = link_to(broker)
    link.publish({"a": b"1", "b": b"1"})
    link.publish({"a": b"2"})  # before anybody could hear the first
    link.start()
    broker.until(lambda: broker.lines == ["here: connected"])
    assert broker.held == [(1, "a", b"2"), (1, "b", b"1")]  # in the order in which they were first said
    link.publish({"a": b"2", "b": b"3"})
    broker.until(lambda: broker.held[2:] == [(1, "b", b"3")])
    assert broker.client is not None
    broker.client.push(ConnectionResetError("gone"))
    broker.until(lambda: broker.lines[-1] == "here: connected" and len(broker.lines) == 3)
    assert broker.lines[1] == "here: the connection is lost; going on without presence, trying again"
    assert broker.held[3:] == [(2, "a", b"2"), (2, "b", b"3")]
    link.close({"a": b"last"})
    assert broker.held[5:] == [(2, "a", b"last")]
    link.publish({"a": b"too late"})
    assert broker.left == ["broken", "clean"]
    assert broker.client.subscribed == ["t/+"]


def test_messages_and_ticks_come_to_whoever_asked() -> None:
    broker, came = Played(), list[Any]()
    ticked, connected = threading.Event(), list[int]()
    link = link_to(
        broker,
        on_message=lambda *message: (came.append(message), broker.say("came")),
        on_tick=ticked.set,
        on_connected=lambda: connected.append(1),
    )
    link.start()
    broker.until(lambda: broker.lines)
    assert ticked.is_set()
    assert connected == [1]
    assert link.is_connected
    assert broker.client is not None
    broker.client.push(SimpleNamespace(topic="t/x", payload=b"y"))
    broker.until(lambda: "came" in broker.lines)
    assert came == [("t/x", b"y")]
    link.close({})
    assert not link.is_connected


def kept_out(code: int) -> Exception:
    error = OSError("refused")
    error.rc = SimpleNamespace(value=code)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(111, "Connection refused"), "the broker cannot be used: [Errno 111] Connection refused"),
        (OSError("a\nb\x1b"), "the broker cannot be used: a b "),
        (ValueError(), "the broker cannot be used: ValueError"),
        (kept_out(134), "the broker does not know this user with this password; see EXPERTSWARM_MQTT_PASSWORD"),
        (kept_out(135), "the broker does not let this user in with this password; see EXPERTSWARM_MQTT_PASSWORD"),
        (OSError("[SSL: CERTIFICATE_VERIFY_FAILED] x"), "the broker's certificate is not one to trust here ([SSL: "),
    ],
)
def test_why_there_is_no_connection_is_said_once(error: Exception, told: str) -> None:
    broker = Played(error, error)
    link = link_to(broker)
    link.start()
    broker.until(lambda: len(broker.lines) == 2)
    assert broker.connections == 3
    assert broker.lines[0].startswith(f"here: {told}")
    assert broker.lines[0].endswith("; going on without presence, trying again")
    assert broker.lines[1] == "here: connected"
    link.close({})


def test_an_end_is_heard_while_it_waits_to_try_again() -> None:
    broker = Played(*[OSError("x")] * 1000)
    link = link_to(broker)
    link.start()
    broker.until(lambda: broker.lines)
    link.close({"a": b"1"})
    assert not link._thread.is_alive()
    assert broker.held == []
