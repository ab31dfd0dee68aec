"""One connection with an invite's key: the worker's own key goes out, its name comes back."""

from __future__ import annotations

import time

import zmq

from protocol import PROTOCOL_VERSION
from protocol.errors import ProtocolError
from protocol.frames import decode_to_worker
from protocol.messages import Enrol, Enrolled, Refused

from .connection import Connection
from .errors import Break, LinkBroken, WorkerError
from .session import Session
from .stopping import Stop

ANSWER_S = 30.0


class Stopped(Exception):
    """Somebody on this machine ends the worker."""


def enrol(session: Session, public_key: bytes, name: str, stop: Stop) -> Enrolled:
    """Enrol over a session of the invite's key. LinkBroken when there is no answer, WorkerError when it is no."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connection = Connection(context, session, lasts=False)
    try:
        return _asked(connection, Enrol(PROTOCOL_VERSION, public_key, name), stop)
    finally:
        connection.close()
        context.term()


def _asked(connection: Connection, message: Enrol, stop: Stop) -> Enrolled:
    poller = zmq.Poller()
    for source in (connection.socket, connection.monitor, stop.fd):
        poller.register(source, zmq.POLLIN)
    give_up = time.monotonic() + ANSWER_S
    while (left := give_up - time.monotonic()) > 0:
        events = dict(poller.poll(int(left * 1000) + 1))
        if stop.fd in events:
            raise Stopped
        if connection.socket in events:
            return _answer(connection)
        if connection.monitor in events and connection.is_up():
            connection.send(message)
    raise LinkBroken(Break.SILENT)


def _answer(connection: Connection) -> Enrolled:
    try:
        answer, _ = decode_to_worker(connection.receive())
    except ProtocolError as error:
        raise WorkerError(f"the backbone's answer to enrolling cannot be read: {error}") from None
    if isinstance(answer, Refused):
        raise WorkerError(f"refused by the backbone: {answer.reason}")
    if not isinstance(answer, Enrolled):
        raise WorkerError(f"the backbone's answer to enrolling is {type(answer).__name__}; update expertswarm there")
    return answer
