"""How exact a worker is, measured before it is used: a few rows of each kind of experts that it holds.

They are asked for by ordinary calls, drawn afresh each time, and look like a small batch of a real layer's rows.
Legend: R rows, D width.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kernels.interface import F32, I32

from .apart import Apart, Question
from .oracle import Kind, Oracle, same_bits
from .roster import Peer

ROWS = 8  #: of a probe at least, each with one expert
MOST_EXPERTS = 3  #: of a probe
OUTLIERS = 0.01  #: of a row's columns, at least one, that are much larger than the others
OUTLIER_TIMES = (3.0, 10.0)  #: as large as the others

Todo = Callable[[Callable[[], None]], None]  #: puts off what takes long until there is time


@dataclass(slots=True)
class Measure:
    """What was found of one kind of experts."""

    worst: float = 0.0  #: relative L2 distance from float64 of the row that is farthest off
    is_same_bits: bool | None = None  #: as the class has, where this machine can compute in it; None: not known


@dataclass(slots=True)
class _Probe:
    peer: Peer
    session: int
    kind: Kind
    layer: int
    x: F32
    pairs: I32
    left: int = 0  #: experts that have yet to be looked at
    found: Measure | None = None


def probe_rows(draw: random.Random, count: int, width: int) -> F32:
    """Rows [count, width] float32 such as a norm gives: root mean square 1, some columns large in all of them."""
    # Sums of four are normal enough; numpy's own generators take longer to import than all of this.
    words = np.frombuffer(draw.randbytes(16 * count * width), "<u4").reshape(4, count, width)
    rows = words.sum(axis=0, dtype=np.float64) / 2**32 - 2
    large = draw.sample(range(width), max(1, round(OUTLIERS * width)))
    rows[:, large] *= [draw.uniform(*OUTLIER_TIMES) for _ in large]
    rows /= np.sqrt((rows * rows).mean(axis=1, keepdims=True))
    found: F32 = rows.astype(np.float32)
    return found


def probe_pairs(draw: random.Random, experts: list[int]) -> tuple[int, I32]:
    """How many rows, and the pairs (row, expert) of all of them, as a router would have chosen."""
    ids = draw.sample(experts, min(len(experts), MOST_EXPERTS))
    count = -(-ROWS // len(ids))
    pairs = [(row, expert) for row in range(count) for expert in draw.sample(ids, len(ids))]
    return count, np.array(pairs, np.int32)


class Prober:
    """Asks workers for rows of what they hold that was not measured in their session, and measures those.

    `kinds`: of each layer. `on_found` is told of each measure, `on_failed` of a worker that does not answer.
    """

    def __init__(
        self,
        apart: Apart,
        oracle: Oracle,
        kinds: Mapping[int, Kind],
        width_of: Callable[[int], int],
        *,
        todo: Todo,
        on_found: Callable[[Peer, Kind, Measure], None],
        on_failed: Callable[[Peer], None],
    ) -> None:
        self._apart, self._oracle, self._kinds, self._width_of = apart, oracle, kinds, width_of
        self._todo, self._on_found, self._on_failed = todo, on_found, on_failed
        self._draw = random.SystemRandom()  # nobody can foresee what he is asked
        self._under_way: set[tuple[str, int, Kind]] = set()

    def look_at(self, peer: Peer) -> None:
        """Probe what a worker has loaded of kinds that were not measured yet."""
        for layer, assigned in list(peer.assigned.items()):
            kind = self._kinds[layer]
            key = peer.name, peer.session, kind
            if peer.is_here and assigned.is_loaded and not assigned.is_proven and key not in self._under_way:
                self._ask(peer, kind, layer, sorted(assigned.experts))

    def _ask(self, peer: Peer, kind: Kind, layer: int, experts: list[int]) -> None:
        count, pairs = probe_pairs(self._draw, experts)
        ((_, _, _, width),) = [part for part in kind[0] if part[0] == "gate"]
        probe = _Probe(peer, peer.session, kind, layer, probe_rows(self._draw, count, width), pairs)
        self._under_way.add((peer.name, peer.session, kind))
        question = Question(
            probe.x, pairs, lambda rows: self._on_rows(probe, rows.copy()), lambda: self._on_no_rows(probe)
        )
        if not self._apart.ask(peer.name, layer, self._width_of(layer), question):
            self._under_way.discard((peer.name, peer.session, kind))

    def _is_wanted(self, probe: _Probe) -> bool:
        return probe.peer.is_here and probe.peer.session == probe.session

    def _on_no_rows(self, probe: _Probe) -> None:
        self._under_way.discard((probe.peer.name, probe.session, probe.kind))
        if self._is_wanted(probe):
            self._on_failed(probe.peer)

    def _on_rows(self, probe: _Probe, rows: F32) -> None:
        experts = sorted(set(probe.pairs[:, 1].tolist()))
        probe.left, probe.found = len(experts), Measure()
        for expert in experts:
            self._todo(lambda expert=expert: self._measure(probe, expert, rows))  # type: ignore[misc]

    def _measure(self, probe: _Probe, expert: int, rows: F32) -> None:
        """Look at one expert's rows; with the last one all is known."""
        found, probe.left = probe.found, probe.left - 1
        if found is None or not self._is_wanted(probe):
            self._under_way.discard((probe.peer.name, probe.session, probe.kind))
            return
        at = np.nonzero(probe.pairs[:, 1] == expert)[0]
        x, mine = probe.x[probe.pairs[at, 0]], rows[at]
        found.worst = max(found.worst, self._oracle.error(probe.layer, expert, x, mine))
        own = self._oracle.rows(probe.peer.declared, probe.layer, expert, x)
        if own is not None:
            found.is_same_bits = found.is_same_bits is not False and same_bits(own, mine)
        if not probe.left:
            self._under_way.discard((probe.peer.name, probe.session, probe.kind))
            self._on_found(probe.peer, probe.kind, found)
