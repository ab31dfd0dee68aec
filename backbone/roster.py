"""Who is in the swarm: each worker's connections, what it was assigned and what it did. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from protocol.repeats import Repeats

from .local_workers import LocalWorker
from .oracle import Kind
from .ranks import Rank
from .tally import Tally
from .vouched import Vouched

log = logging.getLogger(__name__)

MOST_FAILURES = 8  #: that are kept of a worker
MOST_LOST = 16  #: workers that are kept in mind when they are lost, the last ones
MOST_GREETINGS = 32  #: at once, of a worker; each costs a plan
GREETINGS_PER_S = 0.5  #: in the long run


@dataclass(slots=True)
class WorkerReport:
    """What a worker is and did, for the table at the end of an answer."""

    name: str
    tally: Tally = field(default_factory=Tally)  #: what its failures cost
    backend: str = ""
    device: str = ""
    numeric_class: str = ""  #: that it counts as; one of its own when its rows are not what it said
    build: str = ""
    rank: str = ""  #: measured; empty before
    error: float = 0.0  #: relative L2 distance from float64 of the worst row that was measured
    audits: int = 0  #: answers of it that were computed again
    audits_failed: int = 0  #: of which it had some wrong
    in_doubt: int = 0  #: calls up to when it was found out, but those that were audited whole and right
    experts: int = 0  #: that it holds for us now
    calls: int = 0
    rows: int = 0
    seconds: float = 0.0  #: computing
    state: str = "starting"  #: then joined, loading, serving; or unfit, lost, left
    failures: list[str] = field(default_factory=list)  #: the last ones
    failed: int = 0  #: how many there were


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """A worker that can be asked, as a prediction sees it."""

    name: str
    backend: str
    is_local: bool
    bytes_per_s: float | None  #: of experts; None while that is not known
    holds: Mapping[int, frozenset[int]]  #: experts by layer


@dataclass(frozen=True, slots=True)
class Assigned:
    """Experts of a layer that a worker was asked to hold, and whether it has loaded them."""

    epoch: int
    experts: frozenset[int]
    is_loaded: bool = False
    is_proven: bool = False  #: and its rows of experts like these were measured


@dataclass(slots=True)
class Peer:
    """A worker's connections and what is known of it. A worker is its key; routes come and go."""

    key: bytes  #: public, Z85
    report: WorkerReport
    worker: LocalWorker | None = None  #: its process, of one that this backbone started
    calls_route: bytes | None = None
    weights_route: bytes | None = None
    session: int = 0  #: counts its greetings
    memory_bytes: int = 0  #: what it says that it may hold of experts; 0: no bound
    wanted: Mapping[int, frozenset[int]] = field(default_factory=dict)  #: experts by layer, as planned
    assigned: dict[int, Assigned] = field(default_factory=dict)  #: by layer
    cannot: dict[int, str] = field(default_factory=dict)  #: layers that it refused to load in this session, and why
    is_told: bool = False  #: that there are such
    is_announced: bool = False  #: that it serves, in this session
    is_barred: bool = False  #: it sent garbage and may not come back
    lost_s: float = 0.0  #: when it was lost last
    declared: str = ""  #: the numeric class that it says it is of
    promise: Rank = Rank.F32  #: what that class promises
    measured: set[Kind] = field(default_factory=set)  #: kinds of experts, in this session
    worst: float = 0.0  #: of the rows that were measured in this session: relative L2 distance from float64
    is_same_bits: bool | None = None  #: as its class has, where this machine can compute in it
    rank: Rank | None = None  #: by all of this; None before
    is_caught: bool = False  #: an audit found rows of it wrong: it is not believed again
    caught_worst: float = 0.0  #: how far off those were
    vouched: Vouched = field(default_factory=Vouched)  #: its calls that audits found right
    greetings_left: float = MOST_GREETINGS
    greeted_s: float = 0.0  #: when it said hello last

    @property
    def name(self) -> str:
        """Its name in logs and tables."""
        return self.report.name

    @property
    def is_local(self) -> bool:
        """Whether this backbone started it."""
        return self.worker is not None

    @property
    def is_lost(self) -> bool:
        """Whether it failed or left, and did not come back."""
        return self.report.state in ("lost", "left")

    @property
    def is_here(self) -> bool:
        """Whether it has said hello and can be asked."""
        return self.calls_route is not None and not self.is_lost and not self.is_unfit

    @property
    def is_unfit(self) -> bool:
        """Whether its rows are so wrong that it is asked for nothing."""
        return self.report.state == "unfit"

    @property
    def is_off(self) -> bool:
        """Whether its rows are not of the class that it said."""
        return self.report.numeric_class != self.declared

    @property
    def bar(self) -> float:
        """The most that its rows may be off: by its class's promise, or as measured where it does not keep that."""
        return self.rank.bar if self.is_off and self.rank is not None else self.promise.tolerance

    @property
    def is_loading(self) -> bool:
        """Whether some of what it was assigned has yet to be loaded, or its rows of it to be measured."""
        return self.is_here and any(not (each.is_loaded and each.is_proven) for each in self.assigned.values())

    def may_greet(self, now_s: float) -> bool:
        """Count a greeting; whether it is not one too many."""
        earned = (now_s - self.greeted_s) * GREETINGS_PER_S
        self.greetings_left, self.greeted_s = min(self.greetings_left + earned, MOST_GREETINGS) - 1, now_s
        return self.greetings_left >= 0

    def fail(self, reason: str, now_s: float, *, is_trusted: bool) -> None:
        """The worker is lost. What it was asked to hold it will be asked anew, should it come back."""
        self.report.state, self.report.experts, self.lost_s = "lost", 0, now_s
        self.wanted, self.assigned, self.cannot, self.measured = {}, {}, {}, set()
        self.note(reason, is_trusted=is_trusted)

    def note(self, reason: str, *, is_trusted: bool) -> None:
        """The worker failed, and may be back by now."""
        del self.report.failures[: -MOST_FAILURES + 1]
        self.report.failures.append(reason)
        self.report.failed += 1
        self.is_barred = self.is_barred or not is_trusted


@dataclass(frozen=True, slots=True)
class Earlier:
    """Workers that were lost long ago, together."""

    workers: int
    tally: Tally


class Roster:
    """Peers by key and by name."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._forgotten: dict[bytes, bool] = {}  #: keys, and whether they are barred
        self._earlier_tally = Tally()
        self.dropped = 0  #: messages and answers that were not used
        self._repeats = Repeats()

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_key.values()))  # whoever iterates may add and forget

    def drop(self, who: str, what: str, reason: str, now_s: float) -> None:
        """A message is not used: it is counted, and told of once in a while. `what` is ours, not the peer's."""
        self.dropped += 1
        if (tail := self._repeats.tail((who, what), now_s)) is not None:
            log.warning("%s of %s was dropped: %s%s", what, who, reason, tail)

    def free_name(self, wanted: str) -> str:
        """The name, or one like it that is nobody's here: calls and grants of weights go by names."""
        name, number = wanted, 1
        while name in self._by_name:
            number += 1
            name = f"{wanted}-{number}"
        return name

    def add(self, peer: Peer) -> None:
        """A worker was started, or came in, under a name that is nobody's."""
        peer.is_barred = self._forgotten.pop(peer.key, False) or peer.is_barred
        self._by_key[peer.key] = peer
        self._by_name[peer.name] = peer

    def long_lost(self) -> list[Peer]:
        """Those that need not be kept in mind. Whoever gave wrong rows always is: so is that it did."""
        lost = [p for p in self if p.is_lost and not p.is_local and not p.is_caught]
        return sorted(lost, key=lambda peer: peer.lost_s)[: max(0, len(lost) - MOST_LOST)]

    def forget(self, peer: Peer, *, is_gone: bool = False) -> None:
        """A lost worker counts among the earlier ones from now on; under its key it may come back, unless barred.

        `is_gone`: it was revoked, and never comes back.
        """
        del self._by_key[peer.key], self._by_name[peer.name]
        if not is_gone:
            self._forgotten[peer.key] = peer.is_barred
        self._earlier_tally.add(peer.report.tally)

    @property
    def earlier(self) -> Earlier:
        """Those that are forgotten: how many have not come back, and what all of them cost."""
        return Earlier(len(self._forgotten), self._earlier_tally)

    def of_key(self, key: bytes) -> Peer | None:
        """Whose key this is."""
        return self._by_key.get(key)

    def named(self, name: str) -> Peer:
        """The worker of this name."""
        return self._by_name[name]
