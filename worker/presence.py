"""A joined worker's presence at the broker: what it is and does, and where its backbone says that it is.

Needs the extra `mqtt`. Calls never wait for it: its thread looks at the worker's activity now and then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from protocol.broker import Broker, parse_broker
from protocol.errors import ProtocolError
from protocol.messages import MAX_NAME, Hello
from protocol.presence import (
    MAX_TEXT,
    Capabilities,
    Endpoint,
    Health,
    State,
    backbone_topic,
    capabilities_topic,
    fingerprint,
    health_topic,
    parse_backbone,
    parse_endpoint,
    swarm_id,
    to_payload,
    worker_id,
)
from protocol.presence_link import Link, connector
from protocol.schema import one_line

from .activity import Activity
from .errors import UsageError
from .identity import Identity
from .stopping import Stop

log = logging.getLogger(__name__)

CALLS_S = 10.0  #: between two counts of calls, which alone are no news


def broker_of(url: str, *, password: str, password_file: str, ca_file: str) -> Broker:
    """The broker of a flag. UsageError when it cannot be used, or aiomqtt is missing."""
    try:
        broker = parse_broker(url, password=password, password_file=password_file, ca_file=ca_file)
        connector(broker, "", "")
    except ProtocolError as error:
        raise UsageError(f"--mqtt: {error}") from None
    return broker


class Presence:
    """`begin` it as somebody, again when that changes, and `close` it."""

    def __init__(
        self, broker: Broker, hello: Hello, activity: Activity, stop: Stop, say: Callable[[str], None]
    ) -> None:
        self._broker, self._hello, self._activity, self._stop, self._say = broker, hello, activity, stop, say
        self._link: Link | None = None
        self._identity: Identity | None = None
        self._topic = ""  #: of its health
        self._health: Health | None = None  #: as it was said last
        self._calls_due_s = 0.0
        self._endpoints: tuple[Endpoint, ...] = ()

    def begin(self, identity: Identity, name: str) -> None:
        """Be present as an enrolled worker, under the name that its backbone knows it by."""
        swarm, worker = swarm_id(identity.server_key), worker_id(identity.public_key)
        said = {capabilities_topic(swarm, worker): to_payload(capabilities(self._hello, name))}
        if self._link is not None and self._identity is not None and self._identity.public_key == identity.public_key:
            self._link.publish(said)
            return
        self.close()
        self._identity, self._topic = identity, health_topic(swarm, worker)
        self._link = Link(
            connector(self._broker, worker, self._topic),
            place=f"presence at {self._broker}",
            topics=[backbone_topic(swarm)],
            say=self._say,
            on_message=self._on_message,
            on_tick=self._look,
        )
        self._link.publish(said)
        self._link.start()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the backbone of this identity said that it listens. No proof: only its key's handshake is."""
        return self._endpoints

    def close(self) -> None:
        """Leave."""
        link, self._link, self._identity, self._endpoints = self._link, None, None, ()
        if link is not None:
            health = self._health or Health(state=State.OFFLINE, since=0, experts=0, calls=0, last_error="")
            last = replace(health, state=State.OFFLINE, since=int(time.time()), experts=0)
            link.close({self._topic: to_payload(last)})
        self._health = None

    # ---- in the link's thread

    def _look(self) -> None:
        """Say what the worker does, if that is news."""
        link, before, seen = self._link, self._health, self._activity
        if link is None:  # it is being closed
            return
        serving = State.SERVING if seen.is_serving else State.ONLINE
        state = State.LEAVING if self._stop.wait(0) else serving
        since = before.since if before is not None and before.state == state else int(time.time())
        error = one_line(seen.last_error, MAX_TEXT)
        health = Health(state=state, since=since, experts=seen.experts, calls=seen.calls, last_error=error)
        now = time.monotonic()
        if health == before or (
            before is not None and replace(health, calls=before.calls) == before and now < self._calls_due_s
        ):
            return
        self._health, self._calls_due_s = health, now + CALLS_S
        link.publish({self._topic: to_payload(health)})

    def _on_message(self, topic: str, payload: bytes) -> None:
        identity = self._identity
        try:
            said = parse_backbone(payload)
        except ProtocolError as error:
            log.info("what the backbone's topic holds cannot be read: %s", error)
            return
        if said is not None and identity is not None and said.fingerprint == fingerprint(identity.server_key):
            self._endpoints = tuple(parse_endpoint(text) for text in said.endpoints)


def capabilities(hello: Hello, name: str) -> Capabilities:
    """What a worker is, from its HELLO."""
    return Capabilities(
        protocol=hello.protocol,
        name=one_line(name, MAX_NAME),
        build=one_line(hello.build, MAX_TEXT),
        backend=one_line(hello.backend, MAX_TEXT),
        device=one_line(hello.device, MAX_TEXT),
        numeric_class=hello.numeric_class,
        wire_dtypes=hello.wire_dtypes,
        memory_bytes=hello.memory_bytes,
    )
