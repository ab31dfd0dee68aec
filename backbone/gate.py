"""The swarm's door: a CURVE server socket that lets only listed keys in, and knows each message's sender by its key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils import z85

from protocol.frames import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

HEARTBEAT_MS = 1000
SILENCE_MS = 5000  #: after which a connection is given up; a busy machine may hold a peer's thread back for a while
HANDSHAKE_MS = 10_000
QUEUE_MESSAGES = 256
_DOMAIN = "expertswarm"
_MOST_ROUTES = 1024


class Sent(Enum):
    """What became of a message."""

    OK = "ok"
    FULL = "full"  #: the peer's queue is full
    GONE = "gone"  #: there is no such peer any more


Admitted = Callable[[bytes], bool]


class _Listed:
    """Who may come in, asked at each handshake in a thread of its own, so that it may change while the swarm runs."""

    def __init__(self, admitted: Admitted) -> None:
        self.keys: set[bytes] = set()
        self.refused = 0
        self._admitted = admitted

    def callback(self, domain: str, key: bytes) -> bool:
        if key in self.keys or self._admitted(key):
            return True
        self.refused += 1
        log.info("a key that is not admitted was refused: %s", z85.decode(key).hex()[:12])
        return False


def new_key_pair() -> tuple[bytes, bytes]:
    """A public and a secret CURVE key, Z85."""
    public, secret = zmq.curve_keypair()
    return bytes(public), bytes(secret)


class Gate:
    """A ROUTER on one address. Messages come with the sender's public key; routing ids only say where to answer.

    `admitted` says of a key whether it may come in, beside those that `admit` lists; it is called from another thread.
    `keys` are the server's public and secret key; without them it makes new ones. All keys are Z85.
    """

    def __init__(
        self, address: str, *, admitted: Admitted = lambda key: False, keys: tuple[bytes, bytes] | None = None
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listed = _Listed(admitted)
        self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain=_DOMAIN, credentials_provider=self._listed)
        self._keys: dict[bytes, bytes] = {}  #: route to key; a connection never changes its key
        self.public_key, secret = keys or new_key_pair()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = self.public_key, secret
        self.socket.zap_domain = _DOMAIN.encode()
        self.socket.router_mandatory = True
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_FRAME_BYTES
        self.socket.sndhwm = self.socket.rcvhwm = QUEUE_MESSAGES
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = self.socket.heartbeat_ttl = SILENCE_MS
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.ipv6 = "[" in address
        self.socket.bind(address)
        self.endpoint = str(self.socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    @property
    def refused(self) -> int:
        """Handshakes that were refused for their key."""
        return self._listed.refused

    def admit(self, key: bytes) -> None:
        """Let a key in from now on."""
        self._listed.keys.add(key)

    def expel(self, key: bytes) -> None:
        """Let a key in no more; a connection that it has is not used any more, which its owner sees to."""
        self._listed.keys.discard(key)

    def receive(self) -> tuple[bytes, bytes, list[Any]] | None:
        """The next message: sender's key, routing id, buffers; None when there is none."""
        socket, frames = self.socket, list[Any]()
        try:
            first: Any = socket.recv(zmq.NOBLOCK, copy=False)
            frame = first
            while frame.more:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
                frames.append(frame.buffer)
        except zmq.Again:
            return None
        except BaseException:
            # An interrupt between two frames: what is left of the message must not be taken for the next one.
            while socket.get(zmq.RCVMORE):
                socket.recv(zmq.NOBLOCK)
            raise
        route = first.bytes
        return self._keys.get(route) or self._learn(route, first), route, frames

    def _learn(self, route: bytes, frame: Any) -> bytes:
        if len(self._keys) >= _MOST_ROUTES:
            self._keys.clear()
        key = self._keys[route] = str(frame.get("User-Id")).encode()
        return key

    def send(self, route: bytes, frames: Sequence[Any], *, copy: bool = True) -> Sent:
        """Send without blocking."""
        socket, last = self.socket, len(frames) - 1
        try:
            socket.send(route, zmq.NOBLOCK | zmq.SNDMORE)
            for i, frame in enumerate(frames):
                socket.send(frame, zmq.NOBLOCK if i == last else zmq.NOBLOCK | zmq.SNDMORE, copy=copy)
        except zmq.ZMQError as error:  # of the route: what follows it is always taken
            return Sent.FULL if error.errno == zmq.EAGAIN else Sent.GONE
        except BaseException:
            # An interrupt between two frames: the torn message ends here, and its receiver will refuse it.
            socket.send(b"", zmq.NOBLOCK)
            raise
        return Sent.OK

    def close(self) -> None:
        """Close the door and everything behind it."""
        self.socket.close()
        self._auth.stop()
        self._context.term()
