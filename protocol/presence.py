"""Presence: what a swarm's members say of themselves over MQTT, retained, for whoever looks later. Pure.

    expertswarm/SWARM/workers/WORKER/capabilities    what a worker is
    expertswarm/SWARM/workers/WORKER/health          what it does; its last will says that it is offline
    expertswarm/SWARM/backbone                       where the backbone is; the same last will

SWARM is the beginning of the fingerprint of the backbone's public key, WORKER the beginning of the worker's public key,
which `backbone invite list` shows too. Payloads are JSON objects with exactly the fields of their class, checked as the
wire's are; a last will is `{"state": "offline"}` and nothing else.

Presence gives no authority: whoever may write to the broker can say anything here. A worker is admitted by its CURVE
key alone, and a backbone is known by its own: an address that is learnt here is one more place to look for it. No
payload holds a secret: no invite, no secret key, no password.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from .capabilities import ClassInfo
from .errors import ProtocolError
from .invite import MAX_HOSTS, is_host
from .messages import MAX_NAME
from .schema import bounded, from_wire, one_line, to_wire

T = TypeVar("T")
ROOT = "expertswarm"
MAX_PAYLOAD_BYTES = 8192
MAX_TEXT = 256
MAX_TIME = (1 << 53) - 1
_ID = re.compile(r"[0-9a-f]{16}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class State(StrEnum):
    """What a member of the swarm does."""

    ONLINE = "online"  #: it runs, and serves nobody
    SERVING = "serving"
    LEAVING = "leaving"  #: it was told to end and finishes what is under way
    OFFLINE = "offline"


#: The last will: the broker says it for whoever is gone without a word.
WILL = json.dumps({"state": State.OFFLINE}).encode()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a worker is: as in its HELLO."""

    protocol: int
    numeric_class: ClassInfo
    memory_bytes: int  #: what it may hold of experts; 0: no bound
    name: str = bounded(MAX_NAME)  #: that the backbone gave it, or that it would like to have
    build: str = bounded(MAX_TEXT)
    backend: str = bounded(MAX_TEXT)
    device: str = bounded(MAX_TEXT)
    wire_dtypes: tuple[str, ...] = bounded(8)


@dataclass(frozen=True, slots=True)
class Health:
    """What a worker does."""

    calls: int
    state: str = bounded(16)  #: a State
    since: int = bounded(MAX_TIME)  #: unix seconds, by the worker's clock
    experts: int = bounded(1 << 32)  #: that it holds
    last_error: str = bounded(MAX_TEXT)


@dataclass(frozen=True, slots=True)
class BackboneState:
    """Where a backbone is."""

    protocol: int
    build: str = bounded(MAX_TEXT)
    state: str = bounded(16)  #: a State
    since: int = bounded(MAX_TIME)  #: unix seconds, by the backbone's clock
    endpoints: tuple[str, ...] = bounded(MAX_HOSTS)  #: HOST:PORT or [IPV6]:PORT, in the order in which to try them
    fingerprint: str = bounded(64)  #: of its public key


class Endpoint(NamedTuple):
    """Where something listens; an IPv6 address is without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class WorkerTopic(NamedTuple):
    """Which worker's, and which of its two."""

    worker: str
    kind: str


# ---- topics


def fingerprint(server_key: bytes) -> str:
    """The fingerprint of a backbone's raw public key, by which others may tell it from another: 64 digits."""
    return hashlib.sha256(server_key).hexdigest()


def swarm_id(server_key: bytes) -> str:
    """A swarm's name in topics."""
    return fingerprint(server_key)[:16]


def worker_id(public_key: bytes) -> str:
    """A worker's name in topics, and to the broker (the client id): the broker's list of rights goes by it."""
    return public_key.hex()[:16]


def backbone_topic(swarm: str) -> str:
    """Where the backbone says where it is."""
    return f"{ROOT}/{swarm}/backbone"


def capabilities_topic(swarm: str, worker: str) -> str:
    """Where a worker says what it is."""
    return f"{ROOT}/{swarm}/workers/{worker}/capabilities"


def health_topic(swarm: str, worker: str) -> str:
    """Where a worker says what it does."""
    return f"{ROOT}/{swarm}/workers/{worker}/health"


def workers_filter(swarm: str) -> str:
    """What to subscribe to for all of a swarm's workers."""
    return f"{ROOT}/{swarm}/workers/+/+"


def parse_worker_topic(topic: str, swarm: str) -> WorkerTopic:
    """Whose topic this is. ProtocolError when it is none of a worker of this swarm."""
    parts = topic.split("/")
    is_right = len(parts) == 5 and parts[:3] == [ROOT, swarm, "workers"] and _ID.fullmatch(parts[3]) is not None
    if not is_right or parts[4] not in ("capabilities", "health"):
        raise ProtocolError(f"{one_line(topic, 120)!r} is no topic of a worker of this swarm")
    return WorkerTopic(parts[3], parts[4])


# ---- payloads


def to_payload(said: Capabilities | Health | BackboneState) -> bytes:
    """What is published."""
    return json.dumps(to_wire(said), default=to_wire, ensure_ascii=False).encode()


def parse_capabilities(payload: bytes) -> Capabilities:
    """What a worker said that it is. ProtocolError names what is wrong."""
    return from_wire(Capabilities, _object(payload))


def parse_health(payload: bytes) -> Health | None:
    """What a worker said that it does; None for its last will. ProtocolError names what is wrong."""
    return _with_state(Health, payload)


def parse_backbone(payload: bytes) -> BackboneState | None:
    """What a backbone said; None for its last will. ProtocolError names what is wrong."""
    found = _with_state(BackboneState, payload)
    if found is not None:
        if not _FINGERPRINT.fullmatch(found.fingerprint):
            raise ProtocolError(f"{one_line(found.fingerprint, 64)!r} is no fingerprint")
        for text in found.endpoints:
            parse_endpoint(text)
    return found


def parse_endpoint(text: str) -> Endpoint:
    """An endpoint of HOST:PORT or [IPV6]:PORT. ProtocolError when it is none."""
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_number = port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535
    if not is_number or not is_host(host) or (":" in host) != is_bracketed:
        raise ProtocolError(f"{one_line(text, 80)!r} is not HOST:PORT")
    return Endpoint(host, int(port))


def _with_state(kind: type[T], payload: bytes) -> T | None:
    data = _object(payload)
    if data == {"state": State.OFFLINE}:
        return None
    found = from_wire(kind, data)
    if (state := data["state"]) not in set(State):
        raise ProtocolError(f"{kind.__name__}.state is {one_line(state, 32)!r}, not one of {', '.join(State)}")
    return found


def _object(payload: bytes) -> Any:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a payload of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")
    try:
        return json.loads(payload.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ProtocolError(f"a payload that is no JSON: {one_line(error, 100)}") from None
