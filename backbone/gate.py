"""The swarm's door: a CURVE server socket that lets only listed keys in, and knows each frame's sender by its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
import zmq.auth.thread

from protocol.frames import MAX_FRAME_BYTES

_DOMAIN = "expertswarm"


class _Listed:
    """The list of keys, asked at each handshake, so that it may change while the swarm runs."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


def new_key_pair() -> tuple[bytes, bytes]:
    """A public and a secret CURVE key, Z85."""
    public, secret = zmq.curve_keypair()
    return bytes(public), bytes(secret)


class Gate:
    """A ROUTER on one address. Frames come with the sender's public key; routing ids stay inside."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listed = _Listed()
        self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain=_DOMAIN, credentials_provider=self._listed)
        self.public_key, secret = new_key_pair()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = self.public_key, secret
        self.socket.zap_domain = _DOMAIN.encode()
        self.socket.router_mandatory = True
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_FRAME_BYTES
        self.socket.sndhwm = self.socket.rcvhwm = 1000
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout, self.socket.heartbeat_ttl = 1000, 5000, 5000
        self.socket.handshake_ivl = 10_000
        self.socket.bind(address)
        self.endpoint = str(self.socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    def admit(self, key: bytes) -> None:
        """Let a key in from now on."""
        self._listed.keys.add(key)

    def expel(self, key: bytes) -> None:
        """Let a key in no more."""
        self._listed.keys.discard(key)

    def receive(self) -> tuple[bytes, bytes, list[Any]] | None:
        """The next message: sender's key, routing id, frames; None when there is none."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        key = frames[-1].get("User-Id")
        return str(key).encode(), frames[0].bytes, frames[1:]

    def send(self, route: bytes, frames: Sequence[Any], *, copy: bool = True) -> bool:
        """Send without blocking; whether the peer took it. False: it is gone, or its queue is full."""
        try:
            self.socket.send_multipart([route, *frames], zmq.NOBLOCK, copy=copy)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def close(self) -> None:
        """Close the door and everything behind it."""
        self.socket.close()
        self._auth.stop()
        self._context.term()
