"""Who means ill gets nothing and changes nothing; it is refused, told of in the log, and counted."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from intruder import GREETING, House, free_port, house_of, say
from swarm_kit import NoLocal, ask, by_index, some_rows
from wire import raw, tensors_of
from zmq.utils import z85

from backbone import lines
from backbone.gate import Sent, new_key_pair
from backbone.invite_book import BOOK
from backbone.lines import FIRST_BYTES
from backbone.placement import Plan
from backbone.roster import MOST_GREETINGS
from protocol import PROTOCOL_VERSION
from protocol.frames import DType, Tensor, encode
from protocol.messages import (
    MAX_CHUNK_BYTES,
    Assign,
    Attach,
    Chunk,
    Enrol,
    Enrolled,
    Failed,
    Fetch,
    Goodbye,
    Ready,
    Refused,
    Rows,
    Run,
    Welcome,
)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with house_of(tmp_path) as made:
        yield made


# ---- the handshake


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("wrong key", "it is not known"),
        ("used-up invite", "the invite was used up"),
        ("expired invite", "the invite has expired"),
        ("revoked invite", "the invite was revoked"),
        ("revoked worker", "this worker was revoked"),
    ],
)
def test_a_key_that_may_not_come_in_is_refused_in_the_handshake(
    house: House, caplog: pytest.LogCaptureFixture, case: str, told: str
) -> None:
    if case == "wrong key":
        keys = new_key_pair()
    elif case == "revoked worker":
        keys = house.enrolled("phone")
        house.revoke(keys)
    else:
        keys = house.invite()
        if case == "used-up invite":
            with house.book.changing() as invites:
                invites.enrol(z85.decode(keys[0]), bytes(32), "phone", 1)
        elif case == "expired invite":
            house.expire(keys)
        else:
            house.revoke(keys)
    house.book.reload_if_changed()
    with house.open() as swarm:
        client = house.client(keys)
        say(client, house.hello())
        assert not house.is_let_in(client)
        house.until(lambda: swarm.refused >= 1)
        assert swarm.report() == []
        assert not client.poll(0)
    assert f"the key {z85.decode(keys[0]).hex()[:12]}... was refused: {told}" in caplog.text


# ---- an invite's key


@pytest.mark.parametrize("kind", ["Hello", "Attach", "Fetch", "Rows", "Ready", "Failed", "Goodbye", "junk"])
def test_an_invite_may_only_enrol(house: House, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    with house.open() as swarm:
        client = house.client(house.invite())
        messages: dict[str, Any] = {
            "Hello": house.hello(),
            "Attach": Attach(PROTOCOL_VERSION),
            "Fetch": Fetch(bytes(32), 0, 9),
            "Rows": Rows(1, 1, 1),
            "Ready": Ready(1, 0),
            "Failed": Failed(1, 1, "no"),
            "Goodbye": Goodbye("bye"),
        }
        message = messages.get(kind)
        client.send_multipart([b"\xc1"] if message is None else encode(message, tensors_of(message)))
        (told,) = house.heard(client)
        assert isinstance(told, Refused)
        wanted = "cannot be read" if message is None else f"an invite's key may only enrol; it sent {kind}"
        assert wanted in told.reason
        assert (swarm.refused, swarm.dropped) == (1, 1)
        assert swarm.report() == []
        assert wanted in caplog.text


def test_one_use_is_one_worker_however_many_came_in_with_the_invite(house: House) -> None:
    keys, mine, theirs = house.invite(), bytes([1]) * 32, bytes([2]) * 32
    with house.open() as swarm:
        first, second = house.client(keys), house.client(keys)
        assert house.is_let_in(first)
        assert house.is_let_in(second)
        say(first, Enrol(PROTOCOL_VERSION, mine, "a"))
        assert isinstance(house.heard(first)[0], Enrolled)
        written = (house.book.folder / BOOK).stat()
        say(second, Enrol(PROTOCOL_VERSION, theirs, "b"))
        assert "used up" in house.heard(second)[0].reason
        assert swarm.refused == 1
        assert list(house.book.invites.workers) == [mine]
        assert (house.book.folder / BOOK).stat() == written  # who is refused costs no writing


@pytest.mark.parametrize("case", ["expire", "revoke"])
def test_an_invite_that_ends_between_handshake_and_enrolling(house: House, case: str) -> None:
    keys = house.invite()
    with house.open() as swarm:
        client = house.client(keys)
        assert house.is_let_in(client)
        getattr(house, case)(keys)
        say(client, Enrol(PROTOCOL_VERSION, bytes([1]) * 32, "a"))
        assert f"the invite {'has expired' if case == 'expire' else 'was revoked'}" in house.heard(client)[0].reason
        assert swarm.refused == 1
        assert not house.book.invites.workers


def test_a_damaged_book_is_the_enrollers_trouble_alone(house: House, caplog: pytest.LogCaptureFixture) -> None:
    keys = house.invite()
    x, ids = some_rows(house.model)
    with house.open() as swarm:
        client = house.client(keys)
        assert house.is_let_in(client)
        (house.book.folder / BOOK).write_text("{}")
        say(client, Enrol(PROTOCOL_VERSION, bytes([1]) * 32, "a"))
        assert "its log says why" in house.heard(client)[0].reason
        assert ask(swarm, 0, x, ids).tobytes() == house.model.local().send(0, x, ids).tobytes()
    assert f"{BOOK}: is damaged" in caplog.text


# ---- an enrolled worker


def test_who_chooses_its_routing_id_is_not_heard(house: House, caplog: pytest.LogCaptureFixture) -> None:
    x, ids = some_rows(house.model)
    with house.open() as swarm:
        thief = house.client(house.enrolled("thief"), route=b"phone")
        say(thief, house.hello())
        house.until(lambda: swarm.refused >= 1)
        assert swarm.report() == []
        assert swarm._gate.send(b"phone", [b"for the real phone"]) is Sent.GONE or not thief.poll(0)
        thief.close(linger=0)
        assert ask(swarm, 0, x, ids).tobytes() == house.model.local().send(0, x, ids).tobytes()
    assert "was hung up: it chose its routing id" in caplog.text


def test_a_routing_id_that_was_anothers_gives_no_standing(house: House) -> None:
    victim_keys, keys, route = house.enrolled("victim"), house.enrolled("thief"), b"\0phon"  # as ZeroMQ makes them
    with house.open() as swarm:
        victim = house.client(victim_keys, route=route)
        say(victim, house.hello())
        welcome, *assigned = house.heard(victim, 1 + house.model.layers)
        assert welcome == Welcome("victim")
        victim.close(linger=0)
        tries: list[Any] = []

        def is_in() -> bool:  # as long as the id is not free, a connection with it is ignored for good
            for each in tries[-2:-1]:
                each.close(linger=0)
            tries.append(house.client(keys, route=route))
            say(tries[-1], Attach(PROTOCOL_VERSION))
            for _ in range(50):
                swarm.serve_due(0.02)
            return len(swarm.report()) == 2

        house.until(is_in)
        thief = tries[-1]
        say(thief, Fetch(assigned[0].slices[0].sha256, 0, 9))
        while isinstance(told := house.heard(thief)[0], Welcome):  # said to whoever had the id, before that was known
            assert told == welcome
        assert "were not assigned to this worker" in told.reason
        say(thief, Goodbye("I am the victim"))
        house.until(lambda: swarm.dropped == 2)
        # Nothing more goes to the victim by that id.
        assert swarm.report()[0].failures == ["its connection is gone"]


def test_rows_for_anothers_calls_are_dropped(house: House, caplog: pytest.LogCaptureFixture) -> None:
    x, ids = some_rows(house.model)
    wanted = house.model.local().send(0, x, ids).tobytes()
    holder = {(la, e): 0 for la in range(house.model.layers) for e in range(house.model.experts)}
    with house.open(1, local=NoLocal(), placement=by_index(holder)) as swarm:
        thief = house.client(house.enrolled("thief"))
        say(thief, house.hello())
        assert house.heard(thief) == [Welcome("thief")]
        before = swarm.dropped
        for _ in range(20):
            assert ask(swarm, 0, x, ids).tobytes() == wanted
            ticket = swarm.send(0, x, ids)
            call = next(iter(swarm._dispatcher._calls.values())).call
            lie = np.full((call.pairs, call.width), 7, "<f4")
            say(thief, Rows(call.seq, call.epoch, 1), (Tensor(DType.F32, lie.shape, lie),))
            say(thief, Failed(call.seq, call.epoch, "the other one cannot"))
            assert swarm.wait(ticket).tobytes() == wanted
        house.until(lambda: swarm.dropped - before == 40)
        assert [r.failures for r in swarm.report()] == [[], []]
        assert swarm.report()[1].calls == 0
        while thief.poll(0):  # by which it is looked for those whose connection is gone
            assert house.heard(thief) == [Welcome("thief")]


def test_only_assigned_slices_and_only_their_bytes_are_served(house: House, caplog: pytest.LogCaptureFixture) -> None:
    model, keys = house.model, house.enrolled("thief")

    def place(sizes: Any, candidates: Any, **options: Any) -> Plan:
        return by_index({(0, 0): 0, (0, 1): 0})(sizes, candidates) if candidates else Plan({}, {})

    with house.open(placement=place) as swarm:
        thief = house.client(keys)
        say(thief, house.hello())
        _, assign = house.heard(thief, 2)
        assert isinstance(assign, Assign)
        assert {(assign.layer, piece.expert) for piece in assign.slices} == {(0, 0), (0, 1)}
        mine = {piece.sha256 for piece in assign.slices}
        size = model.inner * model.width * 4
        swarm._joining._slices.grant("another", 0, range(model.experts), by_path=False)  # all hashes are known
        swarm._joining._slices.grant("another", 1, range(model.experts), by_path=False)
        others = [sha for sha in swarm._joining._slices._data if sha not in mine]
        assert len(others) == 2 * 3 * model.experts - 6
        one = min(mine)
        wishes = [
            *(Fetch(sha, 0, 9) for sha in others),
            *(Fetch(one, offset, length) for offset, length in [(size, 1), (size - 8, 9), (1 << 40, MAX_CHUNK_BYTES)]),
            Fetch(one, 0, 0),
            Fetch(one, 0, MAX_CHUNK_BYTES),
        ]
        weights = house.client(keys)
        say(weights, Fetch(one, 0, 9))  # before it said what it is for
        house.until(lambda: swarm.dropped == 1)
        say(weights, Attach(PROTOCOL_VERSION))
        for wish in wishes:
            say(weights, wish)
        assert {type(told) for told in house.heard(weights, len(wishes))} == {Refused}
        assert swarm.dropped == 1 + len(wishes)
        say(weights, Fetch(one, 0, size))
        assert house.heard(weights) == [Chunk(one, 0)]
        assert "were not assigned to this worker" in caplog.text
        assert len(caplog.records) < 5  # however much it asks for


def test_nobody_takes_the_name_of_a_worker_of_the_backbones(house: House) -> None:
    x, ids = some_rows(house.model)
    wanted = house.model.local().send(0, x, ids).tobytes()
    invite, public = house.invite(), bytes([1]) * 32
    keys = house.enrolled("phone")
    with house.book.changing() as invites:  # as a book of another day may have it
        entry = invites.workers[z85.decode(keys[0])]
        invites.workers[entry.key] = type(entry)(key=entry.key, name="local-1", invite=entry.invite, enrolled=1)
    with house.open(1, local=NoLocal()) as swarm:
        enroller = house.client(invite)
        say(enroller, Enrol(PROTOCOL_VERSION, public, "local-1"))
        assert house.heard(enroller)[0].name == "local-1-2"
        thief = house.client(keys)
        say(thief, Attach(PROTOCOL_VERSION))
        held = next(iter(swarm._joining._slices._granted["local-1"]))
        say(thief, Fetch(held, 0, 9))
        assert "not assigned" in house.heard(thief)[0].reason
        assert [r.name for r in swarm.report()] == ["local-1", "local-1-2"]
        say(thief, Goodbye("I am local-1"))
        house.until(lambda: swarm.dropped == 2)
        assert ask(swarm, 0, x, ids).tobytes() == wanted
        assert swarm.report()[0].failures == []


def test_who_greets_again_and_again_is_barred(house: House, caplog: pytest.LogCaptureFixture) -> None:
    x, ids = some_rows(house.model)
    with house.open() as swarm:
        client, count = house.client(house.enrolled("phone")), 3 * MOST_GREETINGS
        for _ in range(count):
            say(client, house.hello())
        refused = 0
        while refused < count - MOST_GREETINGS - 20:
            (told,) = house.heard(client)
            refused += isinstance(told, Refused)
        changes = swarm._joining.changes
        say(client, house.hello())
        house.until(lambda: swarm.dropped >= refused + 1)
        assert swarm._joining.changes == changes  # what is refused costs no plan
        assert "it says hello again and again" in swarm.report()[0].failures[-1]
        assert ask(swarm, 0, x, ids).tobytes() == house.model.local().send(0, x, ids).tobytes()


@pytest.mark.parametrize("case", ["silent", "junk", "version", "slow"])
def test_no_worker_from_elsewhere_keeps_the_swarm_from_starting(house: House, case: str) -> None:
    port = free_port()
    client = house.client(house.enrolled("phone"), endpoint=f"tcp://127.0.0.1:{port}")
    if case == "version":
        head = raw(encode(Attach(PROTOCOL_VERSION)))[0]
        client.send(head.replace(b"protocol" + bytes([PROTOCOL_VERSION]), b"protocol" + bytes([PROTOCOL_VERSION + 1])))
    elif case == "slow":
        say(client, house.hello())  # and never loads what it is given
    else:
        client.send(b"\xc1" if case == "junk" else encode(Attach(PROTOCOL_VERSION))[0])
    with house.open(1, port=port, join_timeout_s=20) as swarm:
        house.until(lambda: len(swarm.report()) == 2)
        assert swarm.report()[0].state in ("serving", "loading")


@pytest.mark.parametrize("tick_ms", [lines.TICK_MS, 600_000], ids=["watched", "quicker"])
def test_a_message_beyond_what_was_asked_for_is_cut_off(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tick_ms: int
) -> None:
    monkeypatch.setattr(lines, "TICK_MS", tick_ms)
    x, ids = some_rows(house.model)
    with house.open() as swarm:
        client = house.client(house.enrolled("phone"))
        say(client, house.hello())
        house.heard(client)
        client.send_multipart([bytes(1 << 16)] * 1000)  # each frame is small; the message is not
        house.until(lambda: swarm.refused >= 1)
        assert ask(swarm, 0, x, ids).tobytes() == house.model.local().send(0, x, ids).tobytes()
        client.close(linger=0)
    assert swarm.dropped == 0  # nobody read it
    assert "was hung up: more bytes came than any message that was asked for" in caplog.text


def test_plain_tcp_fills_no_memory_before_the_handshake(house: House, caplog: pytest.LogCaptureFixture) -> None:
    with house.open() as swarm, socket.create_connection(("127.0.0.1", int(swarm.endpoint.rpartition(":")[2]))) as tcp:
        tcp.settimeout(20)
        tcp.sendall(GREETING + b"\x06" + (200 << 20).to_bytes(8, "big"))
        sent = 0
        with contextlib.suppress(ConnectionError):  # it is hung up on
            while sent < 200 << 20:
                sent += tcp.send(bytes(1 << 20))
        house.until(lambda: swarm.refused >= 1)
        assert FIRST_BYTES < sent < 200 << 20
    assert "was hung up" in caplog.text


def test_a_run_from_a_worker_is_no_message(house: House) -> None:
    with house.open() as swarm:
        client = house.client(house.enrolled("phone"))
        say(client, house.hello())
        house.heard(client, 1 + house.model.layers)
        say(client, Run(1, 1, 0), tensors_of(Run(1, 1, 0)))
        house.until(lambda: swarm.dropped == 1)
        assert "unknown message 'Run'" in swarm.report()[0].failures[-1]
