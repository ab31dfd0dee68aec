"""What `worker join` meets: a gate that asks the book of invites, and processes that join."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zmq.utils import z85

from backbone.commands.invite import new_invite
from backbone.enrolling import answer
from backbone.gate import Gate
from backbone.invite_book import InviteBook
from backbone.weights import SliceServer
from protocol.frames import DType, Tensor, decode_to_backbone, encode
from protocol.invite import Invite
from protocol.messages import Attach, Chunk, Fetch, Hello, Message, Refused

ROOT = str(Path(__file__).parents[2])
PATIENCE_S = 30.0


class Door:
    """A backbone's gate in front of its book. Enrolment, and slices if there is a server, are answered; the rest is
    kept in `heard` as (key, message).
    """

    def __init__(self, state: Path, address: str = "tcp://127.0.0.1:*", slices: SliceServer | None = None) -> None:
        self.book = InviteBook({"XDG_STATE_HOME": str(state)})
        self.server_key, secret = self.book.server_keys()
        self.now = int(time.time())
        self.gate = Gate(address, refusal=self._refusal, keys=(z85.encode(self.server_key), z85.encode(secret)))
        self.slices = slices
        self.heard: list[tuple[bytes, Any]] = []
        self.routes: dict[bytes, bytes] = {}  #: of the connection for calls
        self.refused: list[str] = []
        self.fetched = 0  #: bytes
        self.most_fetched = 1 << 60  #: after which no more are sent

    def _refusal(self, key: bytes) -> str:
        return self.book.invites.refusal(z85.decode(key), self.now)

    @property
    def port(self) -> int:
        return int(self.gate.endpoint.rpartition(":")[2])

    def invite(self, *, uses: int = 1, ttl_s: int = 3600, hosts: tuple[str, ...] = ("127.0.0.1",)) -> Invite:
        return new_invite(self.book, hosts, self.port, uses=uses, ttl_s=ttl_s, now=self.now)

    def pump(self, until: Callable[[], Any]) -> None:
        """Answer until something is so."""
        give_up = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < give_up, (self.heard, self.refused)
            if self.gate.socket.poll(50) and (received := self.gate.receive()) is not None:
                self._on_message(*received)

    def hear(self, kind: type[Any]) -> tuple[bytes, Any]:
        """The next message of a kind, with its sender's key."""
        found: list[tuple[bytes, Any]] = []

        def is_here() -> bool:
            found.extend(pair for pair in self.heard if isinstance(pair[1], kind))
            return bool(found)

        self.pump(is_here)
        self.heard.remove(found[0])
        return found[0]

    def say(self, key: bytes, *messages: Message) -> None:
        for message in messages:
            self.gate.send(self.routes[key], encode(message))

    def _on_message(self, z85_key: bytes, route: bytes, frames: Sequence[Any]) -> None:
        key, (message, _) = z85.decode(z85_key), decode_to_backbone(frames)
        if self.book.invites.is_invite(key):
            with self.book.changing() as invites:
                told = answer(invites, key, message, server_key=self.server_key, now=self.now)
            if isinstance(told, Refused):
                self.refused.append(told.reason)
            self.gate.send(route, encode(told))
        elif isinstance(message, Fetch) and self.slices is not None:
            self._on_fetch(key, route, message)
        else:
            if isinstance(message, Hello):
                self.routes[key] = route
            if not isinstance(message, Attach):
                self.heard.append((key, message))

    def _on_fetch(self, key: bytes, route: bytes, fetch: Fetch) -> None:
        assert self.slices is not None
        data = self.slices.read(key.hex(), fetch)
        assert data is not None
        if self.fetched + len(data) > self.most_fetched:
            self.most_fetched = 0  # a smaller one behind it would fit
            return
        self.fetched += len(data)
        self.gate.send(route, encode(Chunk(fetch.sha256, fetch.offset), [Tensor(DType.U8, (len(data),), data)]))

    def close(self) -> None:
        self.gate.close()


class Joiner:
    """A `worker join` process with a state and a cache folder of its own, whose standard error is read line by line."""

    def __init__(self, home: Path, *args: str) -> None:
        environ = os.environ | {
            "PYTHONPATH": ROOT,
            "XDG_STATE_HOME": str(home / "state"),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        self.log = home / f"log-{time.monotonic_ns()}"
        home.mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            command = [sys.executable, "-P", "-m", "worker", "join", "--backend", "numpy", *args]
            self.process = subprocess.Popen(command, stderr=log, stdout=log, stdin=subprocess.DEVNULL, env=environ)

    def told(self) -> str:
        return self.log.read_text()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> tuple[int, str]:
        """How it ended by itself: its code and its last line."""
        code = self.process.wait(PATIENCE_S)
        lines = self.told().splitlines()
        return code, lines[-1] if lines else ""

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.end()


@contextlib.contextmanager
def joiners() -> Iterator[Callable[..., Joiner]]:
    """Starts joining processes, of which none is left afterwards."""
    made: list[Joiner] = []

    def start(home: Path, *args: str) -> Joiner:
        made.append(Joiner(home, *args))
        return made[-1]

    try:
        yield start
    finally:
        for joiner in made:
            joiner.process.kill()
            joiner.process.wait()
