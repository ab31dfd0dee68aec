"""What a worker says of itself, and whom it believes, with a link that only remembers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from protocol.broker import parse_broker
from protocol.capabilities import ClassInfo
from protocol.messages import Hello
from protocol.presence import (
    BackboneState,
    Endpoint,
    Health,
    backbone_topic,
    fingerprint,
    health_topic,
    parse_health,
    swarm_id,
    to_payload,
    worker_id,
)
from worker import presence
from worker.activity import Activity
from worker.identity import Identity
from worker.presence import CALLS_S, Presence

SERVER, OTHER = bytes(range(32)), bytes(32)
HELLO = Hello(1, "1", "numpy", "cpu", ClassInfo("c", "f32", "f32"), ("f32",), 0, ())


class Link:
    """What was published."""

    made: list[Link]

    def __init__(self, connect: Any, **given: Any) -> None:
        self.given, self.held = given, dict[str, bytes]()
        self.made.append(self)

    def publish(self, said: dict[str, bytes]) -> None:
        self.held |= said

    def start(self) -> None:
        pass

    def close(self, last: dict[str, bytes]) -> None:
        self.held |= last


class Told:
    """A worker that is present, its clocks, and whether somebody wants its end."""

    def __init__(self) -> None:
        self.activity, self.now, self.is_told_to_end = Activity(), 1000.0, False
        stop: Any = SimpleNamespace(wait=lambda seconds: self.is_told_to_end)
        self.presence = Presence(parse_broker("mqtt://box"), HELLO, self.activity, stop, print)
        self.begin(1)

    def begin(self, key: int) -> None:
        self.identity = Identity(
            name="w",
            hosts=("box",),
            port=1,
            server_key=SERVER,
            public_key=bytes([key] * 32),
            secret_key=b"",
            invite_key=b"",
            is_enrolled=True,
        )
        self.presence.begin(self.identity, "w")

    def look(self) -> Health:
        self.link.given["on_tick"]()
        health = parse_health(self.link.held[health_topic(swarm_id(SERVER), worker_id(self.identity.public_key))])
        assert health is not None
        return health

    @property
    def link(self) -> Link:
        return Link.made[-1]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    Link.made = []
    monkeypatch.setattr(presence, "Link", Link)
    monkeypatch.setattr(presence, "connector", lambda *args: None)
    told = Told()
    clock = SimpleNamespace(time=lambda: told.now, monotonic=lambda: told.now)
    monkeypatch.setattr(presence, "time", clock)
    return told


def test_a_state_has_the_time_since_which_it_is_so(told: Told) -> None:
    assert (told.look().state, told.look().since) == ("online", 1000)
    told.now, told.activity.is_serving = 1001.0, True
    assert (told.look().state, told.look().since) == ("serving", 1001)
    told.now, told.activity.experts = 1002.0, 5
    assert (told.look().experts, told.look().since) == (5, 1001)
    told.now, told.is_told_to_end = 1003.0, True
    assert (told.look().state, told.look().since) == ("leaving", 1003)
    link = told.link
    told.presence.close()
    last = parse_health(link.held[health_topic(swarm_id(SERVER), worker_id(told.identity.public_key))])
    assert last is not None
    assert (last.state, last.since, last.experts) == ("offline", 1003, 0)


def test_calls_alone_are_told_now_and_then(told: Told) -> None:
    told.look()
    told.activity.calls = 3
    assert told.look().calls == 0
    told.now += CALLS_S
    assert told.look().calls == 3
    told.activity.calls, told.activity.last_error = 4, "x" * 300
    assert told.look().calls == 4
    assert len(told.look().last_error) == 256


def test_only_its_own_backbone_says_where_it_is(told: Told) -> None:
    def say(key: bytes, *endpoints: str) -> None:
        state = BackboneState(
            protocol=1, build="", state="serving", since=0, endpoints=endpoints, fingerprint=fingerprint(key)
        )
        told.link.given["on_message"](backbone_topic(swarm_id(SERVER)), to_payload(state))

    assert told.link.given["topics"] == [backbone_topic(swarm_id(SERVER))]
    say(OTHER, "liar:1")
    told.link.given["on_message"]("", b"nonsense")
    assert told.presence.endpoints() == ()
    say(SERVER, "box:7", "[::1]:8")
    say(OTHER, "liar:1")
    told.link.given["on_message"]("", b'{"state": "offline"}')
    assert told.presence.endpoints() == (Endpoint("box", 7), Endpoint("::1", 8))


def test_another_key_is_another_worker(told: Told) -> None:
    first = told.link
    told.presence.begin(told.identity, "renamed")
    assert told.link is first
    assert any(b"renamed" in payload for payload in first.held.values())
    told.look()
    told.begin(2)
    assert told.link is not first
    assert b"offline" in first.held[health_topic(swarm_id(SERVER), "01" * 8)]
    assert told.look().state == "online"
