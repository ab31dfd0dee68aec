"""Who of the swarm's workers is present, by what they say over MQTT. Pure: messages and the time come in.

Only workers that are enrolled are listed, under the names that the backbone gave them: whoever may write to the broker
can say anything, but not make up a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from protocol.errors import ProtocolError
from protocol.presence import Capabilities, Health, State, parse_capabilities, parse_health, parse_worker_topic

UNKNOWN = "unknown"  #: nothing was heard since the broker was reached


@dataclass(slots=True)
class _Entry:
    heard_s: float
    state: str = UNKNOWN
    capabilities: Capabilities | None = None
    health: Health | None = None
    is_present: bool | None = None  #: as it was told last; None: it was not here in this process's time


class Attendance:
    """`name_of` gives the name of an enrolled worker's id, None for any other."""

    def __init__(self, swarm: str, name_of: Callable[[str], str | None]) -> None:
        self._swarm, self._name_of = swarm, name_of
        self._entries: dict[str, _Entry] = {}
        self.ignored = 0  #: messages of nobody who is enrolled, or that could not be read

    def connected(self) -> None:
        """The broker is reached, perhaps again: what it kept comes now, and what it did not keep is unknown."""
        for entry in tuple(self._entries.values()):
            entry.state = UNKNOWN

    def heard(self, topic: str, payload: bytes, now_s: float) -> str:
        """Take in a message; a line for the log where it is news that people want. ProtocolError says what is wrong."""
        try:
            worker, kind = parse_worker_topic(topic, self._swarm)
            name = self._name_of(worker)
            if name is None:
                raise ProtocolError(f"{worker} is no enrolled worker")
            if kind == "capabilities":
                self._entry(worker, now_s).capabilities = parse_capabilities(payload)
                return ""
            health = parse_health(payload)
        except ProtocolError:
            self.ignored += 1
            raise
        return self._on_health(self._entry(worker, now_s), health, name)

    def rows(self, now_s: float) -> list[dict[str, Any]]:
        """Everybody who was heard of, by name."""
        found = list[dict[str, Any]]()
        for worker, entry in tuple(self._entries.items()):
            name = self._name_of(worker)
            if name is None:  # revoked
                continue
            capabilities = _plain(entry.capabilities)
            row = {"name": name, "id": worker, "state": entry.state, "age_s": round(now_s - entry.heard_s, 1)}
            found.append(row | {"capabilities": capabilities, "health": _plain(entry.health)})
        return sorted(found, key=lambda row: str(row["name"]))

    def _entry(self, worker: str, now_s: float) -> _Entry:
        entry = self._entries.setdefault(worker, _Entry(now_s))
        entry.heard_s = now_s
        return entry

    def _on_health(self, entry: _Entry, health: Health | None, name: str) -> str:
        was_present = entry.is_present
        if health is None:  # its last will; what it did last is left to be read
            entry.state = State.OFFLINE
        else:
            entry.health, entry.state = health, health.state
        if entry.state != State.OFFLINE:
            entry.is_present = True
            return f"worker {name} is back" if was_present is False else ""
        if not was_present:
            return ""
        entry.is_present = False
        how = "is gone: it left no word, and the broker has its last will" if health is None else "has left"
        return f"worker {name} {how}"


def _plain(said: Capabilities | Health | None) -> dict[str, Any] | None:
    return None if said is None else asdict(said)
