"""The swarm's door: a CURVE server socket that lets only listed keys in, and knows each message's sender by its key."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils import z85

from protocol.frames import MAX_FRAMES, MAX_TENSOR_BYTES
from protocol.repeats import Repeats

from .lines import FIRST_BYTES, Lines

log = logging.getLogger(__name__)

HEARTBEAT_MS = 1000
SILENCE_MS = 5000  #: after which a connection is given up; a busy machine may hold a peer's thread back for a while
HANDSHAKE_MS = 10_000
QUEUE_MESSAGES = 256
ROUTE_BYTES = 5  #: of a routing id that ZeroMQ made: a zero, and a number that began at random
_DOMAIN = "expertswarm"


class Sent(Enum):
    """What became of a message."""

    OK = "ok"
    FULL = "full"  #: the peer's queue is full
    GONE = "gone"  #: there is no such peer any more


Refusal = Callable[[bytes], str]


def _unknown(key: bytes) -> str:
    return "it is not known"


class _Listed:
    """Who may come in, asked at each handshake in a thread of its own, so that it may change while the swarm runs."""

    def __init__(self, refusal: Refusal) -> None:
        self.keys: set[bytes] = set()
        self.refused = 0
        self._refusal = refusal
        self._repeats = Repeats()

    def callback(self, domain: str, key: bytes) -> bool:
        reason = "" if key in self.keys else self._refusal(key)
        if not reason:
            return True
        self.refused += 1
        if (tail := self._repeats.tail(reason, time.monotonic())) is not None:
            log.warning("the key %s... was refused: %s%s", z85.decode(key).hex()[:12], reason, tail)
        return False


def new_key_pair() -> tuple[bytes, bytes]:
    """A public and a secret CURVE key, Z85."""
    public, secret = zmq.curve_keypair()
    return bytes(public), bytes(secret)


class Gate:
    """A ROUTER on one address. Messages come with the sender's public key; routing ids only say where to answer.

    `refusal` says why a key may not come in, empty if it may; it is asked of those that `admit` does not list, from
    another thread.
    `keys` are the server's public and secret key; without them it makes new ones. All keys are Z85.
    """

    def __init__(self, address: str, *, refusal: Refusal = _unknown, keys: tuple[bytes, bytes] | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listed = _Listed(refusal)
        self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain=_DOMAIN, credentials_provider=self._listed)
        self.public_key, secret = keys or new_key_pair()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = self.public_key, secret
        self.socket.zap_domain = _DOMAIN.encode()
        self.socket.router_mandatory = True
        self.socket.linger = 0
        # Of a frame. At a larger one ZeroMQ hangs up and tells nobody; `lines` does at less, and counts.
        self.socket.maxmsgsize = MAX_TENSOR_BYTES
        self.socket.sndhwm = self.socket.rcvhwm = QUEUE_MESSAGES
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = self.socket.heartbeat_ttl = SILENCE_MS
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.ipv6 = "[" in address
        self.socket.bind(address)
        self.endpoint = str(self.socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        self._lines = Lines(self.socket, int(self.endpoint.rpartition(":")[2]))

    @property
    def refused(self) -> int:
        """Handshakes that were refused for their key, and connections that were hung up."""
        return self._listed.refused + self._lines.hung_up

    def asked_for(self, nbytes: int) -> None:
        """A message of so many bytes was asked for of somebody; two of them may be on their way from each."""
        self._lines.most_unread = max(self._lines.most_unread, 2 * nbytes + FIRST_BYTES)

    def admit(self, key: bytes) -> None:
        """Let a key in from now on."""
        self._listed.keys.add(key)

    def expel(self, key: bytes) -> None:
        """Let a key in no more; a connection that it has is not used any more, which its owner sees to."""
        self._listed.keys.discard(key)

    def receive(self) -> tuple[bytes, bytes, list[Any]] | None:
        """The next message: sender's key, routing id, buffers; None when there is none, or one that is not heard."""
        socket, frames, nbytes, count = self.socket, list[Any](), 0, 1
        try:
            first: Any = socket.recv(zmq.NOBLOCK, copy=False)
            frame = first
            while frame.more:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
                count += 1
                nbytes += len(frame)
                if len(frames) <= MAX_FRAMES:  # one more than any may have: it is refused
                    frames.append(frame.buffer)
        except zmq.Again:
            return None
        except BaseException:
            # An interrupt between two frames: what is left of the message must not be taken for the next one.
            while socket.get(zmq.RCVMORE):
                socket.recv(zmq.NOBLOCK)
            raise
        route, fd = first.bytes, first.get(zmq.SRCFD)
        if len(route) != ROUTE_BYTES or route[0]:
            # A peer that chose its id could come by what is meant for another, once that one's connection is gone.
            self._lines.hang_up(fd, "it chose its routing id")
            return None
        if not self._lines.took(fd, nbytes, count):
            return None
        return first.get("User-Id").encode(), route, frames  # the key is the connection's own

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
        self._lines.close()
        self.socket.close()
        self._auth.stop()
        self._context.term()
