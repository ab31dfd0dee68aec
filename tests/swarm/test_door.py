"""Who gets in: listed keys only; what an insider sends is counted, and nothing it sends stops an answer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from swarm_kit import NoLocal, TinyExperts, ask, some_rows, swarm_of
from wire import raw, tensors_of
from zmq.utils.monitor import recv_monitor_message

from backbone import local_workers
from backbone.gate import Gate, Sent, new_key_pair
from protocol import PROTOCOL_VERSION
from protocol.capabilities import ClassInfo
from protocol.frames import decode_to_worker, encode
from protocol.messages import Attach, Chunk, Fetch, Hello, Ready, Refused, Rows, Welcome

PATIENCE_MS = 10_000
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate("tcp://127.0.0.1:*")
    yield gate
    gate.close()


Dealer = Callable[..., Any]


@pytest.fixture
def dealer() -> Iterator[Dealer]:
    """Makes client sockets, which are closed with the test."""
    context: Any = zmq.Context()
    made: list[Any] = []

    def make(endpoint: str, server_key: bytes = b"", keys: tuple[bytes, bytes] = (b"", b""), news: int = 0) -> Any:
        client = context.socket(zmq.DEALER)
        made.append(client)
        client.rcvtimeo, client.handshake_ivl = PATIENCE_MS, 300
        if server_key:
            client.curve_serverkey = server_key
            client.curve_publickey, client.curve_secretkey = keys
        if news:
            made.append(client.get_monitor_socket(news))
        client.connect(endpoint)
        return client

    yield make
    for client in made:
        client.close(linger=0)
    context.term()


def heard(gate: Gate) -> tuple[bytes, bytes, list[bytes]]:
    assert gate.socket.poll(PATIENCE_MS)
    received = gate.receive()
    assert received is not None
    return received[0], received[1], raw(received[2])


def test_a_listed_key_gets_in_and_is_known(gate: Gate, dealer: Dealer) -> None:
    keys = new_key_pair()
    gate.admit(keys[0])
    client = dealer(gate.endpoint, gate.public_key, keys)
    client.send_multipart([b"one", b"two"])
    key, route, frames = heard(gate)
    assert (key, frames) == (keys[0], [b"one", b"two"])
    assert gate.send(route, [b"back", b"again"]) is Sent.OK
    assert client.recv_multipart() == [b"back", b"again"]
    assert gate.receive() is None
    assert gate.send(b"nobody", [b"x"]) is Sent.GONE


@pytest.mark.parametrize("case", ["unlisted", "expelled", "no curve", "wrong server"])
def test_nobody_else_gets_in(gate: Gate, dealer: Dealer, case: str) -> None:
    keys = new_key_pair()
    if case != "unlisted":
        gate.admit(keys[0])
    if case == "expelled":
        gate.expel(keys[0])
    server_key = {"no curve": b"", "wrong server": new_key_pair()[0]}.get(case, gate.public_key)
    client = dealer(gate.endpoint, server_key, keys, FAILED | zmq.EVENT_DISCONNECTED)
    client.send(b"let me in")
    monitor = client.get_monitor_socket()
    assert monitor.poll(PATIENCE_MS)
    event = recv_monitor_message(monitor)["event"]
    if case in ("unlisted", "expelled"):
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert gate.receive() is None


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)])
def test_plain_tcp_is_hung_up_on(gate: Gate, data: bytes) -> None:
    host, port = gate.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=15) as stranger:
        stranger.sendall(data)
        with contextlib.suppress(ConnectionError):  # a reset is as good as an end
            while stranger.recv(4096):
                pass
    assert gate.receive() is None


class Interrupting:
    """A socket whose n-th send or receive is followed by an interrupt, as Ctrl-C would be."""

    def __init__(self, inner: Any, at: int) -> None:
        self._inner, self._left = inner, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _count(self, result: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return result

    def send(self, *args: Any, **options: Any) -> Any:
        return self._count(self._inner.send(*args, **options))

    def recv(self, *args: Any, **options: Any) -> Any:
        return self._count(self._inner.recv(*args, **options))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_leaves_no_torn_message(gate: Gate, dealer: Dealer, at: int) -> None:
    keys = new_key_pair()
    gate.admit(keys[0])
    client = dealer(gate.endpoint, gate.public_key, keys)
    client.send_multipart([b"one", b"two"])
    client.send_multipart([b"three", b"four"])
    assert gate.socket.poll(PATIENCE_MS)
    plain = gate.socket
    gate.socket = Interrupting(plain, at)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        gate.receive()
    gate.socket = plain
    _, route, frames = heard(gate)
    assert frames == [b"three", b"four"]
    gate.socket = Interrupting(plain, at)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        gate.send(route, [b"five", b"six"])
    gate.socket = plain
    assert gate.send(route, [b"seven", b"eight"]) is Sent.OK
    came = client.recv_multipart()
    if came != [b"seven", b"eight"]:
        # What was torn is no message of the protocol, unless it had gone out whole.
        assert came == [b"five", b"six"] if at == 3 else came[-1] == b""
        assert client.recv_multipart() == [b"seven", b"eight"]


@pytest.fixture
def keys_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """The key pairs of the workers that a test starts."""
    made: list[tuple[bytes, bytes]] = []

    def recorded() -> tuple[bytes, bytes]:
        made.append(new_key_pair())
        return made[-1]

    monkeypatch.setattr(local_workers, "new_key_pair", recorded)
    return made


def test_junk_from_a_listed_key_is_counted_and_stops_nothing(
    tmp_path: Path, dealer: Dealer, keys_made: list[tuple[bytes, bytes]]
) -> None:
    model = TinyExperts(tmp_path / "tiny.gguf")
    x, ids = some_rows(model)
    wanted = model.local().send(0, x, ids).tobytes()
    junk: list[list[bytes]] = [
        [b""],
        [b"\xc1"],
        [b"junk"] * 50,
        [bytes(1 << 20)],  # twice as much, and the line is hung up before any of it is read
        *(raw(encode(m, tensors_of(m))) for m in (Rows(1, 1, 1), Ready(1, 0), Fetch(bytes(32), 0, 9))),
        raw(encode(Rows(1, 1, 1), tensors_of(Rows(1, 1, 1))))[:1],
        raw(encode(Chunk(bytes(32), 0), tensors_of(Chunk(bytes(32), 0)))),
    ]
    with swarm_of(model, 2, local=NoLocal()) as swarm:
        client = dealer(swarm._gate.endpoint, swarm._gate.public_key, keys_made[0])
        for frames in junk:
            client.send_multipart(frames)
        while swarm.dropped < len(junk):
            assert ask(swarm, 0, x, ids).tobytes() == wanted
        assert not [r for r in swarm.report() if r.failures]


def test_a_second_connection_of_a_key_replaces_the_first_and_gets_only_what_it_was_assigned(
    tmp_path: Path, dealer: Dealer, keys_made: list[tuple[bytes, bytes]]
) -> None:
    model = TinyExperts(tmp_path / "tiny.gguf")
    x, ids = some_rows(model)
    wanted = model.local().send(0, x, ids).tobytes()
    numeric = model.numeric_class
    kind = ClassInfo(numeric.name, numeric.accumulation, numeric.activations)
    with swarm_of(model, 1) as swarm:
        assert ask(swarm, 0, x, ids).tobytes() == wanted
        client = dealer(swarm._gate.endpoint, swarm._gate.public_key, keys_made[0])
        client.send_multipart(encode(Hello(PROTOCOL_VERSION, "b", "numpy", "d", kind, ("f32",), 0, ())))
        while not client.poll(0):
            assert ask(swarm, 0, x, ids).tobytes() == wanted
        came = [decode_to_worker(client.recv_multipart())[0] for _ in range(1 + model.layers)]
        assert came[0] == Welcome("local-1")
        slices = {piece.sha256 for message in came[1:] for piece in message.slices}  # type: ignore[union-attr]
        assert len(slices) == model.layers * model.experts * 3

        weights = dealer(swarm._gate.endpoint, swarm._gate.public_key, keys_made[0])
        weights.send_multipart(encode(Attach(PROTOCOL_VERSION)))
        for fetch in (Fetch(min(slices), 0, 9), Fetch(bytes(32), 0, 9), Fetch(min(slices), 1 << 30, 9)):
            weights.send_multipart(encode(fetch))
        answers: list[Any] = []
        while len(answers) < 3:
            assert ask(swarm, 0, x, ids).tobytes() == wanted
            while weights.poll(0):
                answers.append(decode_to_worker(weights.recv_multipart())[0])
        assert [type(a) for a in answers] == [Chunk, Refused, Refused]
        assert "were not assigned to this worker" in answers[1].reason
        assert swarm.report()[0].failures[0] == "its connection broke and came back"
