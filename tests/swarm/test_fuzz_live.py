"""Mutated frames against live sockets. With `-m slow` 100,000 of each kind (FUZZ_FRAMES: so many), else a few.

Whatever comes: the process lives and answers with the right bits, does not grow, and gives nobody what is not his.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from intruder import GREETING, House, house_of, say
from join_kit import Door, joiners
from mutations import mutated
from swarm_kit import ask, some_rows
from wire import tensors_of

from backbone.gate import Gate, Sent
from backbone.local_workers import WorkerSpec, start_worker
from backbone.slice_digests import SliceDigests
from backbone.weights import SliceServer
from protocol import PROTOCOL_VERSION
from protocol.errors import ProtocolError
from protocol.frames import DType, Tensor, decode_to_backbone, decode_to_worker, encode
from protocol.messages import (
    Assign,
    Attach,
    Chunk,
    Drain,
    Enrol,
    Enrolled,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    Ready,
    Refused,
    Rows,
    Run,
    Welcome,
)

SLOW = int(os.environ.get("FUZZ_FRAMES", "100000"))
COUNTS = [
    pytest.param(2000, id="fast"),
    pytest.param(SLOW, id="slow", marks=[pytest.mark.slow, pytest.mark.timeout(0)]),
]
GROWTH = 24 << 20  #: bytes that allocators and first uses may take after a tenth of the frames
AT_ONCE = 100


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with house_of(tmp_path) as made:
        yield made


def rss(pid: int | str = "self") -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """How fast it goes, and that the memory does not grow once everything was used."""

    def __init__(self, total: int, pid: int | str = "self") -> None:
        self.total, self.done, self._pid, self._first, self._began = total, 0, pid, 0, time.monotonic()

    def count(self, frames: int) -> bool:
        """Whether that is not enough yet."""
        self.done += frames
        if not self._first and self.done >= self.total // 10:
            self._first = rss(self._pid)
        return self.done < self.total

    def end(self) -> None:
        grown, seconds = rss(self._pid) - self._first, time.monotonic() - self._began
        print(f"{self.done} frames in {seconds:.1f} s, {self.done / seconds:.0f}/s; {grown / 2**20:+.1f} MiB")
        assert grown < GROWTH


class Worker:
    """A client that is enrolled: what it was assigned, and that all that comes is of it."""

    def __init__(self, house: House, number: int) -> None:
        self.house, self.keys = house, house.enrolled(f"bad{number}")
        self.calls, self.weights = house.client(self.keys), house.client(self.keys)
        self.granted: dict[bytes, tuple[str, int]] = {}
        self.experts: set[tuple[int, int]] = set()
        self.epochs = [(1, 0)]
        self.seqs = [1]
        say(self.calls, house.hello())
        say(self.weights, Attach(PROTOCOL_VERSION))

    def drain(self) -> None:
        """Take what came, and look at it."""
        for client in (self.calls, self.weights):
            while client.poll(0):
                self._check(*decode_to_worker(client.recv_multipart()))

    def _check(self, message: Any, tensors: tuple[Tensor, ...]) -> None:
        if isinstance(message, Assign):
            self.granted |= {piece.sha256: (piece.tensor, piece.expert) for piece in message.slices}
            self.experts |= {(message.layer, piece.expert) for piece in message.slices}
            self.epochs.append((message.epoch, message.layer))
        elif isinstance(message, Chunk):
            data = self.house.model.slice_data(*self.granted[message.sha256])
            assert bytes(tensors[0].data) == bytes(data[message.offset : message.offset + len(tensors[0].data)])
        elif isinstance(message, Run):
            self.seqs.append(message.seq)
            assert {(message.layer, int(e)) for e in np.frombuffer(tensors[1].data, "<i4")[1::2]} <= self.experts
        else:
            assert isinstance(message, Welcome | Refused | Drain), message  # who leaves is told so, too

    def send(self, rng: random.Random) -> None:
        """One mutated message of those that would mean something now."""
        epoch, layer = rng.choice(self.epochs[-8:])
        sha = rng.choice(list(self.granted)) if self.granted else bytes(32)
        rows = np.full((rng.choice((1, 2, 5)), rng.choice((1, 32))), rng.choice((0, 1, np.nan)), "<f4")
        message, tensors = rng.choice(
            [
                (self.house.hello(), ()),
                (Attach(PROTOCOL_VERSION), ()),
                (Enrol(PROTOCOL_VERSION, bytes(32), "x"), ()),
                *[(Fetch(sha, rng.choice((0, 1, 4096)), rng.choice((9, 4096))), ())] * 4,
                *[(Ready(epoch, layer), ())] * 2,
                *[(Rows(rng.choice(self.seqs[-4:]), epoch, 1), (Tensor(DType.F32, rows.shape, rows),))] * 3,
                (Failed(rng.choice((0, rng.choice(self.seqs))), epoch, "no"), ()),
                (Goodbye("bye"), ()),
            ]
        )
        client = rng.choice((self.calls, self.weights))
        with contextlib.suppress(Exception):  # its queue is full: the swarm takes its time
            client.send_multipart(mutated(rng, message, tensors), flags=1)


@pytest.mark.parametrize("count", COUNTS)
def test_by_an_enrolled_client(house: House, count: int) -> None:
    x, ids = some_rows(house.model)
    wanted = [house.model.local().send(la, x, ids).tobytes() for la in range(house.model.layers)]
    rng, watch, number = random.Random(1), Watch(count), 0
    with house.open(1, deadline_s=0.3) as swarm:
        going_on = True
        while going_on:
            number += 1
            bad = Worker(house, number)
            for _ in range(10):  # then it has been barred for a while: another one comes
                for _ in range(AT_ONCE):
                    bad.send(rng)
                layer = rng.randrange(house.model.layers)
                swarm.serve_due(0.001)
                assert ask(swarm, layer, x, ids).tobytes() == wanted[layer]
                bad.drain()
                going_on = watch.count(AT_ONCE)
            bad.calls.close(linger=0)
            bad.weights.close(linger=0)
        watch.end()
        assert swarm.dropped > count // 4
        assert len(swarm.report()) <= 1 + number
        assert swarm.report()[0].state in ("serving", "loading"), swarm.report()[0].failures
        assert not swarm.class_changes
        house.until(lambda: len(swarm._gate._lines) <= 2 + 2)


@pytest.mark.parametrize("count", COUNTS)
def test_by_an_invites_key(house: House, count: int) -> None:
    x, ids = some_rows(house.model)
    wanted = house.model.local().send(0, x, ids).tobytes()
    rng, watch, keys = random.Random(2), Watch(count), house.invite(uses=3)
    with house.open() as swarm:
        client = house.client(keys)
        going_on = True
        while going_on:
            for _ in range(AT_ONCE):
                kinds = [
                    Enrol(PROTOCOL_VERSION, rng.randbytes(32), "x"),
                    house.hello(),
                    Fetch(bytes(32), 0, 9),
                    Rows(1, 1, 1),
                ]
                message = rng.choice([*kinds[:1] * 4, *kinds])
                with contextlib.suppress(Exception):
                    client.send_multipart(mutated(rng, message, tensors_of(message)), flags=1)
            swarm.serve_due(0.001)
            assert ask(swarm, 0, x, ids).tobytes() == wanted
            while client.poll(0):
                assert isinstance(decode_to_worker(client.recv_multipart())[0], Refused | Enrolled)
            going_on = watch.count(AT_ONCE)
        watch.end()
        assert swarm.refused > count // 4
        assert swarm.report() == []
        assert len(house.book.invites.workers) <= 3


@pytest.mark.parametrize("count", COUNTS)
def test_by_plain_tcp(house: House, count: int) -> None:
    x, ids = some_rows(house.model)
    wanted = house.model.local().send(0, x, ids).tobytes()
    rng, watch = random.Random(3), Watch(count)
    starts = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff",
        GREETING,
        GREETING,
        GREETING.replace(b"CURVE", b"NULL\0"),
        GREETING[:40],
    ]
    with house.open(1) as swarm:
        port = int(swarm.endpoint.rpartition(":")[2])
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        for i, each in enumerate(slow):
            each.sendall(GREETING[: i % 64])
        going_on = True
        while going_on:
            with socket.create_connection(("127.0.0.1", port)) as tcp, contextlib.suppress(OSError):
                tcp.setblocking(False)
                tcp.send(rng.choice(starts))
                for _ in range(20):
                    going_on = watch.count(1)
                    body = rng.randbytes(rng.choice((0, 1, 8, 200, 200, 5000)))
                    body = rng.choice((b"\x05HELLO\x01\x00", b"\x08INITIATE", b"\x07MESSAGE", b"\x05READY", b"")) + body
                    head = bytes([rng.choice((0, 1, 4, 4, rng.randrange(256))), len(body) % 256])
                    tcp.send(rng.choice((head, b"\x06" + rng.randrange(1 << 64).to_bytes(8, "big"))) + body)
                assert len(tcp.recv(4096)) <= 400
            if rng.random() < 0.02:
                swarm.serve_due(0.001)
                assert ask(swarm, 0, x, ids).tobytes() == wanted
        watch.end()
        assert len(swarm._gate._lines) < 1024
        for each in slow:
            each.close()
        house.until(lambda: len(swarm._gate._lines) == 2)
        assert swarm.report()[0].state == "serving"
        assert ask(swarm, 0, x, ids).tobytes() == wanted


# ---- a hostile backbone


class Hostile:
    """A backbone that means ill, until it is asked to serve."""

    def __init__(self, house: House, gate: Gate) -> None:
        self.model, self.gate = house.model, gate
        self.slices = SliceServer(house.model, share_path=False, digests=SliceDigests(house.model))
        self.calls = self.weights = b""
        self.epoch = 0
        self.heard: list[tuple[Any, Any]] = []
        self.is_alive: Any = lambda: True
        self.is_synchronous = False  #: it has answered to what was sent last
        self.pieces = self.slices.grant("w", 0, range(house.model.experts), by_path=False)

    def pump(self, timeout_ms: int = 0) -> None:
        """Answer the fetches, keep the rest."""
        while self.gate.socket.poll(timeout_ms):
            timeout_ms = 0
            received = self.gate.receive()
            assert received is not None
            _, route, frames = received
            message, tensors = decode_to_backbone(frames)  # what the worker says is always right
            if isinstance(message, Hello):
                self.calls = route
                self.gate.send(route, encode(Welcome("w")))
            elif isinstance(message, Attach):
                self.weights = route
            elif isinstance(message, Fetch):
                data = self.slices.read("w", message) or bytes(message.length)
                chunk = Chunk(message.sha256, message.offset)
                self.gate.send(route, encode(chunk, [Tensor(DType.U8, (len(data),), data)]))
            elif isinstance(message, Failed) and message.seq == 1 << 40:
                self.is_synchronous = True
            else:
                self.heard = [*self.heard[-20:], (message, [(t.shape, bytes(t.data)) for t in tensors])]

    def wait(self, is_so: Any) -> Any:
        give_up = time.monotonic() + 60
        while not (found := is_so()):
            assert self.is_alive(), "the worker has ended"
            assert time.monotonic() < give_up, self.heard[-3:]
            self.pump(50)
        return found

    def answer(self, kind: type[Any], **fields: Any) -> Any:
        """The message of a kind with these fields."""
        is_it = lambda m: isinstance(m, kind) and all(getattr(m, k) == v for k, v in fields.items())  # noqa: E731
        return self.wait(lambda: next((pair for pair in self.heard if is_it(pair[0])), None))

    def attack(self, rng: random.Random) -> int:
        """One message; 0 for one that would just end the worker."""
        self.epoch += 1
        x = np.full((2, self.model.width), rng.choice((0, 1, np.nan)), "<f4")
        pairs = np.array([[0, 0], [rng.choice((1, 2, -1)), rng.choice((0, 3, 9, -1))]], "<i4")
        some = tuple(rng.sample(self.pieces, rng.randint(0, len(self.pieces))))
        message, tensors = rng.choice(
            [
                (Assign(self.epoch, rng.choice((0, 1, 2)), "silu", self.pieces), ()),
                (Assign(self.epoch, rng.choice((0, 1, 2)), rng.choice(("silu", "what")), some), ()),
                *[(Run(self.epoch, rng.randint(0, self.epoch), rng.choice((0, 1))),
                  (Tensor(DType.F32, x.shape, x), Tensor(DType.I32, pairs.shape, pairs)))] * 3,
                (Chunk(self.pieces[0].sha256, 0), (Tensor(DType.U8, (9,), b"123456789"),)),
                (Welcome("another"), ()),
                (Enrolled(bytes(32), "x"), ()),
                (Refused("no"), ()),
                (Drain("go"), ()),
            ]
        )  # fmt: skip
        frames = mutated(rng, message, tensors)
        with contextlib.suppress(ProtocolError):
            if isinstance(decode_to_worker(frames)[0], Refused | Drain):
                return 0
        self.gate.send(rng.choice((self.calls, self.calls, self.weights)), frames)
        return 1

    def _synchronise(self) -> None:
        """Ask for what it answers at once, again if its connection broke, as on a busy machine it may."""
        self.is_synchronous = False
        frames, route = encode(Run(1 << 40, 1 << 40, 9), tensors_of(Run(1, 1, 1))), b""

        def is_answered() -> bool:
            nonlocal route
            if route != self.calls and self.gate.send(self.calls, frames) is Sent.OK:
                route = self.calls
            return self.is_synchronous

        self.wait(is_answered)

    def fuzz(self, watch: Watch, is_alive: Any, rng: random.Random) -> None:
        """So many messages; then it has to serve as ever."""
        self.is_alive = is_alive
        self.wait(lambda: self.calls and self.weights)
        going_on = True
        while going_on:
            going_on = watch.count(sum(self.attack(rng) for _ in range(20)))
            self._synchronise()  # it is as far as this
            self.heard.clear()
        watch.end()
        self.epoch += 1
        self.gate.send(self.calls, encode(Assign(self.epoch, 0, "silu", self.pieces)))
        self.answer(Ready, epoch=self.epoch)
        x, ids = some_rows(self.model)
        pairs = np.array([[r, e] for r, row in enumerate(ids) for e in row], "<i4")
        tensors = [Tensor(DType.F32, x.shape, x), Tensor(DType.I32, pairs.shape, pairs)]
        self.gate.send(self.calls, encode(Run(1 << 41, self.epoch, 0), tensors))
        _, [(_, data)] = self.answer(Rows, seq=1 << 41)
        assert data == self.model.local().send(0, x, ids).tobytes()


@pytest.mark.parametrize("count", COUNTS)
def test_worker_local_by_a_hostile_backbone(house: House, count: int) -> None:
    gate = Gate("tcp://127.0.0.1:*")
    spec = WorkerSpec(backend="numpy", memory_bytes=64 << 20)
    worker = start_worker("w", spec, endpoint=gate.endpoint, server_key=gate.public_key, model=None)
    try:
        gate.admit(worker.public_key)
        hostile = Hostile(house, gate)
        hostile.fuzz(Watch(count, worker.pid), lambda: not worker.has_ended(), random.Random(4))
    except AssertionError:
        print(worker.has_ended(), worker.last_line(), gate.refused)
        raise
    finally:
        worker.stop()
        gate.close()


@pytest.mark.parametrize("count", COUNTS)
def test_worker_join_by_a_hostile_backbone(house: House, tmp_path: Path, count: int) -> None:
    door = Door(tmp_path / "door")
    try:
        with joiners() as start:
            joiner = start(tmp_path / "w", str(door.invite()), "--memory", "64M")
            door.pump(lambda: door.book.invites.workers)
            hostile = Hostile(house, door.gate)
            hostile.fuzz(Watch(count, joiner.process.pid), lambda: not joiner.has_ended(), random.Random(5))
            lines = [line for line in joiner.told().splitlines() if not line.startswith("experts: ")]  # its progress
            assert "Traceback" not in joiner.told()
            assert len(lines) < 200, lines[:20]
    finally:
        door.close()
