"""Who is in the swarm: each worker's process, connections, what it was assigned and what it did. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .local_workers import LocalWorker


@dataclass(slots=True)
class WorkerReport:
    """What a worker is and did, for the table at the end of an answer."""

    name: str
    backend: str = ""
    device: str = ""
    numeric_class: str = ""
    build: str = ""
    experts: int = 0
    calls: int = 0
    rows: int = 0
    seconds: float = 0.0  #: computing
    state: str = "starting"  #: then joined, loading, serving; or lost
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Peer:
    """A worker's connections and what is known of it. A worker is its key; routes come and go."""

    worker: LocalWorker
    report: WorkerReport
    calls_route: bytes | None = None
    weights_route: bytes | None = None
    memory_bytes: int = 0  #: what it says that it may hold of experts; 0: no bound
    epoch: int = 0
    holds: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    to_load: set[int] = field(default_factory=set)  #: layers assigned and not ready
    is_barred: bool = False  #: it sent garbage and may not come back

    @property
    def name(self) -> str:
        """Its name in logs and tables."""
        return self.report.name

    @property
    def is_lost(self) -> bool:
        """Whether it failed, and did not come back."""
        return self.report.state == "lost"

    def fail(self, reason: str, *, is_trusted: bool) -> None:
        """The worker is lost."""
        self.report.state = "lost"
        self.note(reason, is_trusted=is_trusted)

    def note(self, reason: str, *, is_trusted: bool) -> None:
        """The worker failed, and may be back by now."""
        self.report.failures.append(reason)
        self.is_barred = self.is_barred or not is_trusted


class Roster:
    """Peers by key and by name."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self.dropped = 0  #: messages and answers that were not used

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_key.values())

    def add(self, peer: Peer) -> None:
        """A worker was started."""
        self._by_key[peer.worker.public_key] = peer
        self._by_name[peer.name] = peer

    def of_key(self, key: bytes) -> Peer | None:
        """Whose key this is."""
        return self._by_key.get(key)

    def named(self, name: str) -> Peer:
        """The worker of this name."""
        return self._by_name[name]
