"""One encrypted connection to the backbone, and the news of its handshakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.frames import MAX_FRAME_BYTES, Tensor, encode
from protocol.messages import Message

from .errors import WorkerError
from .session import Session

HEARTBEAT_MS = 1000
SILENCE_MS = 5000  #: after which a connection is given up and made again
HANDSHAKE_MS = 10_000
QUEUE_MESSAGES = 256
COPY_BELOW_BYTES = 1 << 20  #: above this keeping ours alive is cheaper than a copy: a thread is woken to let go of it
_NEWS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Connection:
    """A DEALER of the worker's key. ZeroMQ makes the connection again when it breaks; `news` tells."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], session: Session) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.curve_serverkey = session.server_key.encode()
        self.socket.curve_publickey = session.public_key.encode()
        self.socket.curve_secretkey = session.secret_key.encode()
        self.socket.maxmsgsize = MAX_FRAME_BYTES
        self.socket.sndhwm = self.socket.rcvhwm = QUEUE_MESSAGES
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = self.socket.heartbeat_ttl = SILENCE_MS
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.monitor = self.socket.get_monitor_socket(_NEWS)
        self.socket.connect(session.endpoint)

    def is_up(self) -> bool:
        """Read one piece of news: whether the connection is up, perhaps again. WorkerError when it never will be."""
        event = recv_monitor_message(self.monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise WorkerError("the backbone does not let this worker's key in; it is not of this run")
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            raise WorkerError("no CURVE handshake: what answers there is another program, or not that backbone")
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def receive(self) -> list[Any]:
        """The buffers of the message that has come."""
        frame: Any = self.socket.recv(zmq.NOBLOCK, copy=False)
        frames = [frame.buffer]
        while frame.more:
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame.buffer)
        return frames

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> bool:
        """Send without blocking; False when the queue is full, for the backbone takes nothing any more."""
        header, *rest = encode(message, tensors)
        try:
            self.socket.send(header, zmq.NOBLOCK | (zmq.SNDMORE if rest else 0))
        except zmq.Again:
            return False
        for i, data in enumerate(rest, 1):
            copy = memoryview(data).nbytes < COPY_BELOW_BYTES
            self.socket.send(data, zmq.NOBLOCK | (zmq.SNDMORE if i < len(rest) else 0), copy=copy)
        return True

    def close(self) -> None:
        """Close; what was sent last gets a moment to go out."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=200)
