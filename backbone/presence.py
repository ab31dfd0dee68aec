"""The backbone's presence at an MQTT broker: where it is, and who of its workers is there. Needs the extra `mqtt`.

with Presence(broker, server_key=..., endpoints=[...], build=..., name_of=enrolled(book)) as presence:
    ...
    presence.status()   # for status and /status, from any thread
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from protocol import PROTOCOL_VERSION
from protocol.broker import Broker, parse_broker
from protocol.errors import ProtocolError
from protocol.invite import MAX_HOSTS
from protocol.presence import (
    MAX_TEXT,
    BackboneState,
    Endpoint,
    State,
    backbone_topic,
    fingerprint,
    swarm_id,
    to_payload,
    worker_id,
    workers_filter,
)
from protocol.presence_link import Link, connector
from protocol.schema import one_line

from .attendance import Attendance
from .errors import UsageError
from .invite_book import InviteBook
from .settings import Settings

log = logging.getLogger(__name__)


def broker_of(settings: Settings) -> Broker | None:
    """The broker that the settings name, None where they name none. UsageError when it cannot be used, or aiomqtt is
    missing.
    """
    if not settings.mqtt:
        return None
    try:
        broker = parse_broker(
            settings.mqtt,
            password=settings.mqtt_password,
            password_file=settings.mqtt_password_file,
            ca_file=settings.mqtt_ca,
        )
        connector(broker, "", "")
    except ProtocolError as error:
        raise UsageError(f"--mqtt: {error}") from None
    return broker


def enrolled(book: InviteBook) -> Callable[[str], str | None]:
    """Names of the book's workers by their ids in topics."""

    def name_of(worker: str) -> str | None:
        invites = book.invites
        for key in tuple(invites.workers):
            if worker_id(key) == worker and (entry := invites.worker(key)) is not None:
                return entry.name
        return None

    return name_of


class Presence:
    """A context manager: present from its begin to its end. A broker that cannot be reached is a line in the log."""

    def __init__(
        self,
        broker: Broker,
        *,
        server_key: bytes,
        endpoints: Sequence[Endpoint],
        build: str,
        name_of: Callable[[str], str | None],
    ) -> None:
        """`server_key` is the public one, raw; `endpoints` are where workers reach the swarm."""
        swarm = swarm_id(server_key)
        self._broker, self._topic = broker, backbone_topic(swarm)
        self._state = BackboneState(
            protocol=PROTOCOL_VERSION,
            build=one_line(build, MAX_TEXT),
            state=State.SERVING,
            since=int(time.time()),
            endpoints=tuple(map(str, endpoints[:MAX_HOSTS])),
            fingerprint=fingerprint(server_key),
        )
        self._attendance = Attendance(swarm, name_of)
        self._link = Link(
            connector(broker, f"backbone-{swarm}", self._topic),
            place=f"presence at {broker}",
            topics=[workers_filter(swarm)],
            say=log.warning,
            on_message=self._on_message,
            on_connected=self._attendance.connected,
        )

    def __enter__(self) -> Self:
        self._link.publish({self._topic: to_payload(self._state)})
        self._link.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gone = replace(self._state, state=State.OFFLINE, since=int(time.time()))
        self._link.close({self._topic: to_payload(gone)})

    def status(self) -> dict[str, Any]:
        """The broker, and every enrolled worker that was heard of, as plain data."""
        return {
            "broker": str(self._broker),
            "connected": self._link.is_connected,
            "ignored": self._attendance.ignored,
            "workers": self._attendance.rows(time.monotonic()),
        }

    def _on_message(self, topic: str, payload: bytes) -> None:
        try:
            line = self._attendance.heard(topic, payload, time.monotonic())
        except ProtocolError as error:
            log.info("ignored at %s: %s", self._broker, error)
            return
        if line:
            log.warning("%s", line)
