"""Presence at a real mosquitto with the repository's sample configuration: real workers, passwords, TLS, rights."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_checks import need
from join_kit import PATIENCE_S, Door, Joiner, joiners
from mosquitto_kit import PASSWORDS, Mosquitto, make_ca, running, within_patience
from swarm_kit import TinyExperts

from backbone.errors import UsageError
from backbone.invite_book import BOOK
from backbone.knobs import BY_NAME
from backbone.presence import Presence, broker_of, enrolled
from backbone.settings import Setting, Settings
from backbone.slice_digests import SliceDigests
from backbone.weights import SliceServer
from protocol.frames import DType, Tensor, encode
from protocol.messages import Assign, Drain, Failed, Hello, Ready, Rows, Run, Welcome
from protocol.presence import (
    WILL,
    Endpoint,
    State,
    backbone_topic,
    capabilities_topic,
    health_topic,
    parse_backbone,
    parse_capabilities,
    parse_health,
    swarm_id,
    worker_id,
    workers_filter,
)

Start = Callable[..., Joiner]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where brokers' folders are made."""
    need("mosquitto")
    return tmp_path_factory.mktemp("brokers")


@pytest.fixture
def broker(keys: Path, tmp_path: Path) -> Iterator[Mosquitto]:
    folder = tmp_path / "broker"
    folder.mkdir()
    with running(folder) as broker:
        yield broker


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path / "backbone")
    yield door
    door.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("EXPERTSWARM_MQTT_PASSWORD", PASSWORDS["worker"])
    with joiners() as start:
        yield start


def settings(**given: str) -> Settings:
    return Settings({name: Setting(given.get(name, knob.default), "test") for name, knob in BY_NAME.items()})


def presence_of(door: Door, url: str, *, port: int | None = None, ca: str = "") -> Presence:
    """The backbone's presence, of the door's keys and book."""
    broker = broker_of(settings(mqtt=url, mqtt_ca=ca, mqtt_password=PASSWORDS["backbone"]))
    assert broker is not None
    at = Endpoint("127.0.0.1", door.port if port is None else port)
    return Presence(broker, server_key=door.server_key, endpoints=[at], build="1.2", name_of=enrolled(door.book))


def wait_for(is_so: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < give_up
        os.sched_yield()
    return found


def row(presence: Presence, name: str) -> dict[str, Any]:
    return next((row for row in presence.status()["workers"] if row["name"] == name), {"state": None})


def joined(door: Door, start: Start, home: Path, *args: str, name: str = "phone") -> tuple[Joiner, bytes]:
    """A worker that the door has welcomed, and its key."""
    worker = start(home, str(door.invite()), "--name", name, *args)
    key, _ = door.hear(Hello)
    door.say(key, Welcome(name))
    door.pump(lambda: "connected to" in worker.told())
    return worker, key


async def retained(broker: Mosquitto, topic: str, count: int) -> dict[str, bytes]:
    """What somebody who comes later is given at once."""
    found: dict[str, bytes] = {}
    async with broker.client("backbone") as client:
        await client.subscribe(topic)
        async for message in client.messages:
            assert message.retain
            assert isinstance(message.payload, bytes)
            found[str(message.topic)] = message.payload
            if len(found) == count:
                break
    return found


def test_who_comes_later_is_told_what_a_worker_is_and_does(
    broker: Mosquitto, door: Door, start: Start, tmp_path: Path
) -> None:
    worker, key = joined(door, start, tmp_path / "a", "--memory", "64M", "--mqtt", broker.url("worker"))
    with presence_of(door, broker.url("backbone")) as presence:
        door.pump(lambda: row(presence, "phone")["state"] == State.SERVING)
        found = row(presence, "phone")
        assert found["id"] == worker_id(key)
        assert found["age_s"] >= 0
        assert presence.status()["broker"] == f"mqtt://127.0.0.1:{broker.port}"
        wait_for(lambda: presence.status()["connected"])
        assert presence.status()["ignored"] == 0
        assert json.loads(json.dumps(presence.status())) is not None
    swarm = swarm_id(door.server_key)
    kept = within_patience(lambda: retained(broker, workers_filter(swarm), 2))
    is_what = parse_capabilities(kept[capabilities_topic(swarm, worker_id(key))])
    assert (is_what.name, is_what.backend, is_what.memory_bytes) == ("phone", "numpy", 64_000_000)
    assert found["capabilities"]["device"] == is_what.device
    does = parse_health(kept[health_topic(swarm, worker_id(key))])
    assert does is not None
    assert (does.state, does.experts, does.calls, does.last_error) == ("serving", 0, 0, "")
    said = parse_backbone(within_patience(lambda: retained(broker, backbone_topic(swarm), 1))[backbone_topic(swarm)])
    assert said is not None
    assert (said.state, said.endpoints, said.build) == ("offline", (f"127.0.0.1:{door.port}",), "1.2")
    # No secret of anybody's is at the broker.
    texts = b"".join(kept.values()).decode()
    identity = next((tmp_path / "a" / "state").rglob("*.phone.json"))
    held = json.loads(identity.read_text())
    assert held["public_key"] == key.hex()
    for secret in (held["secret_key"], held["invite_key"], PASSWORDS["worker"]):
        assert secret not in texts
        assert secret not in worker.told()


def test_health_counts_experts_calls_and_failures(
    broker: Mosquitto, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyExperts(tmp_path / "tiny.gguf", layers=1, experts=2)
    door = Door(tmp_path / "backbone", slices=SliceServer(model, share_path=False, digests=SliceDigests(model)))
    assert door.slices is not None
    try:
        _, key = joined(door, start, tmp_path / "a", "--mqtt", broker.url("worker"))
        with presence_of(door, broker.url("backbone")) as presence:
            door.say(key, Assign(1, 0, "silu", door.slices.grant(key.hex(), 0, (0, 1), by_path=False)))
            door.hear(Ready)
            door.pump(lambda: (row(presence, "phone").get("health") or {}).get("experts") == 2)
            assert row(presence, "phone")["health"]["last_error"] == ""
            x, good, bad = np.ones((1, model.width), np.float32), np.array([[0, 1]], "<i4"), np.array([[0, 9]], "<i4")
            for pairs, answer in ((good, Rows), (bad, Failed)):
                tensors = [Tensor(DType.F32, x.shape, x), Tensor(DType.I32, pairs.shape, pairs)]
                door.gate.send(door.routes[key], encode(Run(1, 1, 0), tensors))
                _, answered = door.hear(answer)
            door.pump(lambda: row(presence, "phone")["health"]["last_error"])
            assert row(presence, "phone")["health"]["last_error"] == answered.reason
            assert row(presence, "phone")["health"]["calls"] == 1
            door.say(key, Drain("enough"))
            door.pump(lambda: row(presence, "phone")["state"] == State.ONLINE)
            door.pump(lambda: row(presence, "phone")["health"]["experts"] == 0)
    finally:
        door.close()


def test_a_leave_and_a_death_are_told_apart(
    broker: Mosquitto, door: Door, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swarm = swarm_id(door.server_key)
    with presence_of(door, broker.url("backbone")) as presence:
        killed, killed_key = joined(door, start, tmp_path / "a", "--mqtt", broker.url("worker"), name="killed")
        stopped, stopped_key = joined(door, start, tmp_path / "b", "--mqtt", broker.url("worker"), name="stopped")
        for name in ("killed", "stopped"):
            door.pump(lambda name=name: row(presence, name)["state"] == State.SERVING)
        killed.process.kill()
        door.pump(lambda: row(presence, "killed")["state"] == State.OFFLINE)
        assert row(presence, "killed")["health"]["state"] == State.SERVING  # what it did last
        assert stopped.stop() == (0, "worker: stopped")
        wait_for(lambda: row(presence, "stopped")["state"] == State.OFFLINE)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("backbone.")]
    assert "worker killed is gone: it left no word, and the broker has its last will" in lines
    assert "worker stopped has left" in lines
    assert sum("killed" in line for line in lines) == sum("stopped" in line for line in lines) == 1
    kept = within_patience(lambda: retained(broker, workers_filter(swarm), 4))
    assert kept[health_topic(swarm, worker_id(killed_key))] == WILL
    left = parse_health(kept[health_topic(swarm, worker_id(stopped_key))])
    assert left is not None
    assert left.state == State.OFFLINE


def test_the_broker_says_when_the_backbone_is_gone(broker: Mosquitto, door: Door) -> None:
    presence = presence_of(door, broker.url("backbone"))
    topic = backbone_topic(swarm_id(door.server_key))

    async def watch() -> list[bytes]:
        found: list[bytes] = []
        async with broker.client("worker") as client:
            await client.subscribe(topic)
            with presence:
                async for message in client.messages:
                    assert isinstance(message.payload, bytes)
                    found.append(message.payload)
                    if len(found) == 1:  # the broker ends the connection as if the process were dead
                        async with broker.client("backbone", f"backbone-{swarm_id(door.server_key)}"):
                            pass
                    if len(found) == 3:
                        return found
        raise AssertionError(found)

    first, gone, again = within_patience(watch)
    assert gone == WILL
    assert again == first
    said = parse_backbone(first)
    assert said is not None
    assert said.state == State.SERVING


def test_a_wrong_password_is_one_line_and_the_worker_serves(
    broker: Mosquitto, door: Door, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERTSWARM_MQTT_PASSWORD", "wrong-one")
    worker, _ = joined(door, start, tmp_path / "a", "--mqtt", broker.url("worker"))
    door.pump(lambda: sum("not authorised" in line for line in broker.said) > 2)  # it tries again
    lines = [line for line in worker.told().splitlines() if "presence" in line]
    assert lines == [
        f"worker: presence at mqtt://127.0.0.1:{broker.port}: the broker does not let this user in with this password; "
        "see EXPERTSWARM_MQTT_PASSWORD; going on without presence, trying again"
    ]
    assert "wrong-one" not in worker.told()
    assert worker.stop() == (0, "worker: stopped")


def test_tls_with_the_right_ca_and_a_wrong_one(
    broker: Mosquitto, door: Door, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXPERTSWARM_MQTT_PASSWORD")
    (secret := tmp_path / "password").write_text(f"{PASSWORDS['worker']}\n")
    # By the environment what flags say too.
    monkeypatch.setenv("EXPERTSWARM_MQTT", broker.tls_url("worker"))
    monkeypatch.setenv("EXPERTSWARM_MQTT_CA", str(broker.ca))
    monkeypatch.setenv("EXPERTSWARM_MQTT_PASSWORD_FILE", str(secret))
    joined(door, start, tmp_path / "a", name="right")
    with presence_of(door, broker.tls_url("backbone"), ca=str(broker.ca)) as presence:
        door.pump(lambda: row(presence, "right")["state"] == State.SERVING)
    other = make_ca(tmp_path, "other")
    for name in ("", "_CA", "_PASSWORD_FILE"):
        monkeypatch.delenv(f"EXPERTSWARM_MQTT{name}")
    flags = ("--mqtt", broker.tls_url("worker"), "--mqtt-password-file", str(secret), "--mqtt-ca", str(other))
    wrong, _ = joined(door, start, tmp_path / "b", *flags, name="wrong")
    door.pump(lambda: "presence" in wrong.told())
    (line,) = (line for line in wrong.told().splitlines() if "presence" in line)
    assert "the broker's certificate is not one to trust here" in line
    assert "CERTIFICATE_VERIFY_FAILED" in line
    assert not any("worker" in line and worker_id_of(tmp_path / "b") in line for line in broker.said)


def worker_id_of(home: Path) -> str:
    identity = json.loads(next((home / "state").rglob("*.json")).read_text())
    return worker_id(bytes.fromhex(identity["public_key"]))


def test_the_broker_drops_what_a_client_says_in_anothers_name(broker: Mosquitto) -> None:
    swarm, one, other = "0" * 16, "a" * 16, "b" * 16

    async def attack() -> list[str]:
        async with broker.client("backbone") as watcher, broker.client("worker", one) as attacker:
            await watcher.subscribe("#")
            for topic in (
                health_topic(swarm, other),
                capabilities_topic(swarm, other),
                backbone_topic(swarm),
                "expertswarm/anything",
                health_topic(swarm, one),
            ):
                await attacker.publish(topic, b"x", qos=1, retain=True)
            found: list[str] = []
            async for message in watcher.messages:
                found.append(str(message.topic))
                if found[-1] == health_topic(swarm, one):  # the last one that was sent
                    return found
        raise AssertionError

    assert within_patience(attack) == [health_topic(swarm, one)]

    async def listen() -> list[str]:
        async with broker.client("worker", one) as listener, broker.client("backbone") as backbone:
            await listener.subscribe("#")
            await backbone.publish(backbone_topic(swarm), b"x", qos=1)
            found: list[str] = []
            async for message in listener.messages:
                found.append(str(message.topic))
                if found[-1] == backbone_topic(swarm):
                    return found
        raise AssertionError

    assert within_patience(listen) == [backbone_topic(swarm)]  # not what workers say, though it is retained


def presence_lines(worker: Joiner, broker: Mosquitto) -> list[str]:
    return [line.partition(f":{broker.port}: ")[2] for line in worker.told().splitlines() if "presence" in line]


def test_both_come_back_after_the_broker(broker: Mosquitto, door: Door, start: Start, tmp_path: Path) -> None:
    worker, _ = joined(door, start, tmp_path / "a", "--mqtt", broker.url("worker"))
    with presence_of(door, broker.url("backbone")) as presence:
        door.pump(lambda: row(presence, "phone")["state"] == State.SERVING)
        broker.stop()
        door.pump(lambda: not presence.status()["connected"])
        broker.start()  # which remembers nothing
        door.pump(lambda: presence.status()["connected"] and row(presence, "phone")["state"] == State.SERVING)
        door.pump(lambda: presence_lines(worker, broker)[-1] == "connected")
        told = presence_lines(worker, broker)
        assert told[:2] == ["connected", "the connection is lost; going on without presence, trying again"]
        assert "ERROR" not in worker.told()
        swarm = swarm_id(door.server_key)
        assert within_patience(lambda: retained(broker, backbone_topic(swarm), 1))


def test_who_died_while_the_broker_was_away_is_unknown(
    broker: Mosquitto, door: Door, start: Start, tmp_path: Path
) -> None:
    worker, _ = joined(door, start, tmp_path / "a", "--mqtt", broker.url("worker"))
    with presence_of(door, broker.url("backbone")) as presence:
        door.pump(lambda: row(presence, "phone")["state"] == State.SERVING)
        broker.stop()
        worker.process.kill()
        door.pump(lambda: not presence.status()["connected"])
        broker.start()
        door.pump(lambda: presence.status()["connected"])
        assert row(presence, "phone")["state"] == "unknown"


def test_a_worker_finds_a_backbone_that_has_moved(broker: Mosquitto, door: Door, start: Start, tmp_path: Path) -> None:
    worker, key = joined(door, start, tmp_path / "a", "--mqtt", broker.url("worker"))
    door.pump(lambda: "presence" in worker.told())
    door.close()
    moved = Door(tmp_path / "backbone")
    try:
        assert moved.port != door.port
        with presence_of(moved, broker.url("backbone")):
            assert moved.hear(Hello)[0] == key
            moved.say(key, Welcome("phone"))
            moved.pump(lambda: f"connected to 127.0.0.1:{moved.port}" in worker.told())
            worker.stop()
            start(tmp_path / "a", "--mqtt", broker.url("worker"))  # which knows only the old address
            moved.pump(lambda: any(isinstance(message, Hello) for _, message in moved.heard))
    finally:
        moved.close()


def test_who_says_no_where_presence_leads_to_ends_no_worker(
    broker: Mosquitto, door: Door, start: Start, tmp_path: Path
) -> None:
    """Presence gives no authority: at the address that came with the invite, the same answer would be the end."""
    worker, key = joined(door, start, tmp_path / "a", "--mqtt", broker.url("worker"))
    door.pump(lambda: "presence" in worker.told())
    shutil.copytree(door.book.folder, tmp_path / "other" / "expertswarm" / "backbone")
    (tmp_path / "other" / "expertswarm" / "backbone" / BOOK).unlink()
    other, port = Door(tmp_path / "other"), door.port
    try:
        with presence_of(door, broker.url("backbone"), port=other.port):
            door.close()
            other.pump(
                lambda: f"127.0.0.1:{other.port}: the backbone does not let this worker's key in" in worker.told()
            )
        again = Door(tmp_path / "backbone", f"tcp://127.0.0.1:{port}")
        try:
            assert again.hear(Hello)[0] == key
        finally:
            again.close()
    finally:
        other.close()


def test_a_stranger_at_the_broker_is_not_in_the_table(broker: Mosquitto, door: Door, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "backbone.presence")
    swarm = swarm_id(door.server_key)

    async def claim() -> None:
        async with broker.client("worker", "c" * 16) as client:
            await client.publish(health_topic(swarm, "c" * 16), WILL, qos=1, retain=True)

    with presence_of(door, broker.url("backbone")) as presence:
        within_patience(claim)
        wait_for(lambda: presence.status()["ignored"] == 1)
        assert presence.status()["workers"] == []
    assert f"ignored at mqtt://127.0.0.1:{broker.port}: {'c' * 16} is no enrolled worker" in caplog.text


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--mqtt", "box"], "--mqtt: not mqtt://[USER@]HOST[:PORT] or mqtts://[USER@]HOST[:PORT]"),
        (["--mqtt", "mqtt://a:secret@box"], "--mqtt: a URL is no place for a password; set EXPERTSWARM_MQTT_PASSWORD"),
        (
            ["--mqtt", "mqtt://a@box", "--mqtt-password-file", "/nonexistent"],
            "--mqtt: /nonexistent: cannot be read: No",
        ),
        (["--mqtt", "mqtts://a@box", "--mqtt-ca", "/nonexistent"], "--mqtt: /nonexistent: cannot be read: No such"),
    ],
)
def test_a_broker_that_cannot_be_used_ends_in_one_line(
    start: Start, tmp_path: Path, args: list[str], told: str
) -> None:
    worker = start(tmp_path / "a", *args)
    code, line = worker.end()
    assert code == 2
    assert line.startswith(f"worker: error: {told}")
    assert len(worker.told().splitlines()) == 1
    assert "secret" not in line


def test_a_broker_that_the_settings_name_is_checked_by_the_backbone_too() -> None:
    assert broker_of(settings()) is None
    with pytest.raises(UsageError, match="--mqtt: /nonexistent: cannot be read: No such file"):
        broker_of(settings(mqtt="mqtts://a@box", mqtt_ca="/nonexistent"))
