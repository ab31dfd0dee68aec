"""One encrypted connection to the backbone, and the news of its handshakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.frames import MAX_TENSOR_BYTES, Tensor, encode
from protocol.messages import Message

from .errors import Break, LinkBroken
from .session import Session

HEARTBEAT_MS = 1000
SILENCE_MS = 5000  #: after which a connection is given up and made again
HANDSHAKE_MS = 10_000
QUEUE_MESSAGES = 256
COPY_BELOW_BYTES = 1 << 20  #: above this keeping ours alive is cheaper than a copy: a thread is woken to let go of it
CONNECT_MS = 5000  #: for a host that says nothing at all
_NEWS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_ENDINGS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Connection:
    """A DEALER of the worker's key; `news` tells of its handshakes.

    One that `lasts` is made again by ZeroMQ when it breaks. Any other ends then: what was sent over it and did not
    arrive is of no use to the process that answers next.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], session: Session, *, lasts: bool = True) -> None:
        self._lasts, self._was_up = lasts, False
        self.socket = context.socket(zmq.DEALER)
        self.socket.curve_serverkey = session.server_key.encode()
        self.socket.curve_publickey = session.public_key.encode()
        self.socket.curve_secretkey = session.secret_key.encode()
        self.socket.maxmsgsize = MAX_TENSOR_BYTES
        self.socket.sndhwm = self.socket.rcvhwm = QUEUE_MESSAGES
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = self.socket.heartbeat_ttl = SILENCE_MS
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.ipv6 = "[" in session.endpoint
        if not lasts:
            self.socket.reconnect_ivl = -1
            self.socket.connect_timeout = CONNECT_MS
        self.monitor = self.socket.get_monitor_socket(_NEWS if lasts else _NEWS | _ENDINGS)
        self.socket.connect(session.endpoint)

    def is_up(self) -> bool:
        """Read one piece of news: whether the connection is up, perhaps again. LinkBroken when it never will be."""
        event = recv_monitor_message(self.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise LinkBroken(Break.KEY_REFUSED)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            raise LinkBroken(Break.HUNG_UP)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._was_up = True
            return True
        if not self._lasts:
            at_first = Break.NOBODY if event == zmq.EVENT_CLOSED else Break.HUNG_UP
            raise LinkBroken(Break.LOST if self._was_up else at_first)
        return False

    def has_message(self) -> bool:
        """Whether a message waits."""
        return bool(int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> list[Any]:
        """The buffers of the message that has come."""
        frame: Any = self.socket.recv(zmq.NOBLOCK, copy=False)
        frames = [frame.buffer]
        while frame.more:
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame.buffer)
        return frames

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> bool:
        """Send without blocking; False when the queue is full, for the backbone takes nothing any more, or when the
        connection broke in the middle of the message.
        """
        header, *rest = encode(message, tensors)
        try:
            self.socket.send(header, zmq.NOBLOCK | (zmq.SNDMORE if rest else 0))
        except zmq.Again:
            return False
        is_whole = True
        for i, data in enumerate(rest, 1):
            copy = memoryview(data).nbytes < COPY_BELOW_BYTES
            try:
                self.socket.send(data, zmq.NOBLOCK | (zmq.SNDMORE if i < len(rest) else 0), copy=copy)
            except zmq.Again:
                is_whole = False  # ZeroMQ drops what is left of the message: it is to be sent all the same
        return is_whole

    def close(self) -> None:
        """Close; what was sent last gets a moment to go out."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=200)
