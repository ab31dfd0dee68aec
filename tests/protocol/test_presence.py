"""Topics and payloads of presence: what is said is read back; whatever else comes is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.capabilities import ClassInfo
from protocol.errors import ProtocolError
from protocol.invite import is_host
from protocol.presence import (
    MAX_PAYLOAD_BYTES,
    MAX_TEXT,
    WILL,
    BackboneState,
    Capabilities,
    Endpoint,
    Health,
    State,
    WorkerTopic,
    backbone_topic,
    capabilities_topic,
    fingerprint,
    health_topic,
    parse_backbone,
    parse_capabilities,
    parse_endpoint,
    parse_health,
    parse_worker_topic,
    swarm_id,
    to_payload,
    worker_id,
    workers_filter,
)

PARSERS: list[Callable[[bytes], Any]] = [parse_capabilities, parse_health, parse_backbone]
IDS = st.text("0123456789abcdef", min_size=16, max_size=16)


def texts(most: int) -> st.SearchStrategy[str]:
    return st.text(max_size=most).filter(str.isprintable)


counts = st.integers(0, (1 << 63) - 1)
times = st.integers(0, (1 << 53) - 1)
states = st.sampled_from(State).map(str)
endpoints = st.builds(
    Endpoint,
    st.ip_addresses().map(str) | st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z]{2,8})?", fullmatch=True).filter(is_host),
    st.integers(1, 65535),
)
capabilities = st.builds(
    Capabilities,
    protocol=counts,
    numeric_class=st.builds(ClassInfo, texts(20), texts(20), texts(20)),
    memory_bytes=counts,
    name=texts(64),
    build=texts(MAX_TEXT),
    backend=texts(MAX_TEXT),
    device=texts(MAX_TEXT),
    wire_dtypes=st.lists(texts(8), max_size=8).map(tuple),
)
healths = st.builds(
    Health, calls=counts, state=states, since=times, experts=st.integers(0, 1 << 32), last_error=texts(MAX_TEXT)
)
backbones = st.builds(
    BackboneState,
    protocol=counts,
    build=texts(MAX_TEXT),
    state=states,
    since=times,
    endpoints=st.lists(endpoints.map(str), max_size=8).map(tuple),
    fingerprint=st.binary(min_size=32, max_size=32).map(fingerprint),
)


def refusal(parse: Callable[[bytes], Any], payload: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        parse(payload)
    told = str(caught.value)
    assert told.isprintable()
    assert len(told) < 300
    return told


@given(capabilities)
def test_capabilities_are_read_back(said: Capabilities) -> None:
    assert parse_capabilities(to_payload(said)) == said


@given(healths)
def test_health_is_read_back(said: Health) -> None:
    assert parse_health(to_payload(said)) == said


@given(backbones)
def test_where_a_backbone_is_is_read_back(said: BackboneState) -> None:
    assert parse_backbone(to_payload(said)) == said


@given(endpoints)
def test_endpoints_are_read_back(endpoint: Endpoint) -> None:
    assert parse_endpoint(str(endpoint)) == endpoint


def test_the_longest_texts_fit() -> None:
    wide = "\U0001f600" * MAX_TEXT
    said = Capabilities(1, ClassInfo("c", "f32", "f32"), 0, "n", wide, wide, wide, ("f32",))
    assert parse_capabilities(to_payload(said)) == said


def test_a_last_will_is_one_word() -> None:
    assert json.loads(WILL) == {"state": "offline"}
    assert parse_health(WILL) is None
    assert parse_backbone(WILL) is None
    assert "no field" in refusal(parse_health, b'{"state": "online"}')
    assert "unknown field 'state'" in refusal(parse_capabilities, WILL)


HEALTH = {"calls": 1, "state": "online", "since": 2, "experts": 3, "last_error": ""}
BACKBONE = {
    "protocol": 1,
    "build": "b",
    "state": "serving",
    "since": 2,
    "endpoints": ["box:1"],
    "fingerprint": "0" * 64,
}


@pytest.mark.parametrize(
    ("parse", "payload", "told"),
    [
        (parse_health, HEALTH | {"more": 1}, "Health has unknown field 'more'"),
        (parse_health, HEALTH | {"state": "dancing"}, "Health.state is 'dancing', not one of online, serving, leaving"),
        (parse_health, HEALTH | {"calls": -1}, "Health.calls is -1"),
        (parse_health, HEALTH | {"calls": True}, "Health.calls is bool"),
        (parse_health, HEALTH | {"calls": 1.0}, "Health.calls is float"),
        (parse_health, HEALTH | {"calls": int("9" * 4000)}, "Health.calls is 99999"),
        (parse_health, HEALTH | {"last_error": "a\x1b[2J"}, "Health.last_error holds characters"),
        (parse_health, HEALTH | {"last_error": "\ud800"}, "Health.last_error holds characters"),
        (parse_health, HEALTH | {"last_error": "x" * 257}, "Health.last_error has 257 characters"),
        (parse_health, [HEALTH], "Health is a map, not list"),
        (parse_backbone, BACKBONE | {"fingerprint": "0" * 63}, "is no fingerprint"),
        (parse_backbone, BACKBONE | {"endpoints": ["box:1"] * 9}, "BackboneState.endpoints has 9 entries"),
        (parse_backbone, BACKBONE | {"endpoints": ["box"]}, "'box' is not HOST:PORT"),
        (parse_backbone, BACKBONE | {"endpoints": ["box:0"]}, "is not HOST:PORT"),
        (parse_backbone, BACKBONE | {"endpoints": ["box:65536"]}, "is not HOST:PORT"),
        (parse_backbone, BACKBONE | {"endpoints": ["::1:7610"]}, "is not HOST:PORT"),
        (parse_backbone, BACKBONE | {"endpoints": ["[box]:7610"]}, "is not HOST:PORT"),
        (parse_backbone, BACKBONE | {"endpoints": ["a/b:7610"]}, "is not HOST:PORT"),
    ],
)
def test_what_is_wrong_is_named(parse: Callable[[bytes], Any], payload: Any, told: str) -> None:
    assert told in refusal(parse, json.dumps(payload).encode())


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"{",
        b"null",
        b"[" * 8000,
        b'{"a":' * 1600,
        b"9" * 8000,
        b"NaN",
        "{}".encode("utf-16"),
        b"x" * 8193,
    ],
)
def test_what_is_no_payload_is_refused(parse: Callable[[bytes], Any], payload: bytes) -> None:
    told = refusal(parse, payload)
    assert (len(payload) > MAX_PAYLOAD_BYTES) == ("at most 8192 are allowed" in told)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.sampled_from(PARSERS), st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
def test_anything_is_read_or_refused(parse: Callable[[bytes], Any], payload: bytes) -> None:
    try:
        parse(payload)
    except ProtocolError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 300


@given(st.sampled_from([HEALTH, BACKBONE]), st.data())
def test_one_field_of_anything_is_read_or_refused(payload: dict[str, Any], data: st.DataObject) -> None:
    parse = parse_health if payload is HEALTH else parse_backbone
    changed = payload | {data.draw(st.sampled_from(sorted(payload)) | st.text()): data.draw(json_values)}
    try:
        parse(json.dumps(changed).encode())
    except ProtocolError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 300


@given(IDS, IDS)
def test_a_workers_topics_are_told_apart_from_all_others(swarm: str, worker: str) -> None:
    assert parse_worker_topic(capabilities_topic(swarm, worker), swarm) == WorkerTopic(worker, "capabilities")
    assert parse_worker_topic(health_topic(swarm, worker), swarm) == WorkerTopic(worker, "health")
    other = "f" * 16 if swarm == "0" * 16 else "0" * 16
    for topic in (
        backbone_topic(swarm),
        health_topic(other, worker),
        health_topic(swarm, "x" * 16),
        health_topic(swarm, worker[:15]),
        health_topic(swarm, worker) + "/more",
        workers_filter(swarm),
        "",
    ):
        with pytest.raises(ProtocolError, match="is no topic of a worker of this swarm"):
            parse_worker_topic(topic, swarm)


def test_names_are_beginnings_of_what_people_see() -> None:
    key = bytes(range(32))
    assert worker_id(key) == key.hex()[:16]
    assert fingerprint(key).startswith(swarm_id(key))
    assert len(swarm_id(key)) == 16
    assert swarm_id(key) not in key.hex()
