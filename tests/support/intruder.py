"""Whoever means ill: sockets with an enrolled worker's key, with an invite's, or with none, in front of a live swarm."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from swarm_kit import NO_AUDITS, TinyExperts
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from backbone.door import Door
from backbone.gate import new_key_pair
from backbone.invite_book import InviteBook
from backbone.listening import Address
from backbone.local_workers import WorkerSpec
from backbone.swarm import Swarm
from protocol import PROTOCOL_VERSION
from protocol.capabilities import ClassInfo
from protocol.frames import Tensor, decode_to_worker, encode
from protocol.messages import Hello, Message

PATIENCE_S = 30.0
Keys = tuple[bytes, bytes]
#: How a ZMTP peer begins that will speak CURVE, as a client.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


class House:
    """A book of invites and the swarm behind its door."""

    def __init__(self, folder: Path, model: TinyExperts) -> None:
        self.folder, self.model = folder, model
        self.book = InviteBook({"XDG_STATE_HOME": str(folder)})
        self.server_key: bytes = z85.encode(self.book.server_keys()[0])
        self.swarm: Swarm
        self._context: Any = zmq.Context()
        self._made: list[Any] = []

    @contextlib.contextmanager
    def open(self, workers: int = 0, **options: Any) -> Iterator[Swarm]:
        """The swarm, with so many workers of its own."""
        door = Door(Address("127.0.0.1", options.pop("port", 0) or free_port()), self.book)
        options = {"local": self.model.local(), "share_path": False, "checks": NO_AUDITS} | options
        with Swarm(self.model, [WorkerSpec(backend="numpy")] * workers, door=door, **options) as self.swarm:
            yield self.swarm

    def close(self) -> None:
        """Close all sockets that were made here."""
        for each in self._made:
            each.close(linger=0)
        self._context.term()

    # ---- the book, as `backbone invite` writes it

    def invite(self, *, uses: int = 1, ttl_s: int = 3600) -> Keys:
        """Keys of a new invite."""
        keys = new_key_pair()
        with InviteBook({"XDG_STATE_HOME": str(self.folder)}).changing() as invites:
            invites.create(z85.decode(keys[0]), uses=uses, now=int(time.time()), ttl_s=ttl_s)
        self.book.reload_if_changed()
        return keys

    def enrolled(self, name: str) -> Keys:
        """Keys of a worker that enrolled."""
        invite, keys = self.invite(), new_key_pair()
        with self.book.changing() as invites:
            invites.enrol(z85.decode(invite[0]), z85.decode(keys[0]), name, int(time.time()))
        return keys

    def expire(self, keys: Keys) -> None:
        """Time passes for an invite."""
        with InviteBook({"XDG_STATE_HOME": str(self.folder)}).changing() as invites:
            entry = invites.invites[z85.decode(keys[0])]
            invites.invites[entry.key] = replace(entry, created=1, expires=2)

    def revoke(self, keys: Keys) -> None:
        """Somebody revokes an invite or a worker."""
        with InviteBook({"XDG_STATE_HOME": str(self.folder)}).changing() as invites:
            raw = z85.decode(keys[0])
            invites.revoke(invites.invites.get(raw) or invites.workers[raw])

    # ---- at the door

    def client(self, keys: Keys, *, route: bytes = b"", endpoint: str = "") -> Any:
        """A connection with these keys; its monitor tells of the handshake."""
        client = self._context.socket(zmq.DEALER)
        self._made.append(client)
        client.handshake_ivl = 5000
        client.curve_serverkey = self.server_key
        client.curve_publickey, client.curve_secretkey = keys
        if route:
            client.routing_id = route
        self._made.append(client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH))
        client.connect(endpoint or self.swarm.endpoint)
        return client

    def is_let_in(self, client: Any) -> bool:
        """How the handshake ends."""
        assert client.get_monitor_socket().poll(PATIENCE_S * 1000)
        event = recv_monitor_message(client.get_monitor_socket())["event"]
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def hello(self, **changed: Any) -> Hello:
        """A worker's greeting that the backbone takes."""
        numeric = self.model.numeric_class
        kind = ClassInfo(numeric.name, numeric.accumulation, numeric.activations)
        return replace(Hello(PROTOCOL_VERSION, "b", "numpy", "d", kind, ("f32",), 0, ()), **changed)

    def until(self, is_so: Callable[[], Any]) -> None:
        """Let the swarm handle what comes until something is so."""
        give_up = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < give_up, [(r.name, r.state, r.failures) for r in self.swarm.report()]
            self.swarm.serve_due(0.01)

    def heard(self, client: Any, count: int = 1) -> list[Any]:
        """The next messages that a client gets."""
        found: list[Any] = []

        def has_all() -> bool:
            while len(found) < count and client.poll(0):
                found.append(decode_to_worker(client.recv_multipart())[0])
            return len(found) >= count

        self.until(has_all)
        return found


def say(client: Any, message: Message, tensors: tuple[Tensor, ...] = ()) -> None:
    """Send a message."""
    client.send_multipart(encode(message, tensors))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


@contextlib.contextmanager
def house_of(folder: Path, **shape: int) -> Iterator[House]:
    """A house with a tiny model."""
    folder.mkdir(exist_ok=True)
    house = House(folder / "state", TinyExperts(folder / "tiny.gguf", **shape))
    try:
        yield house
    finally:
        house.close()
