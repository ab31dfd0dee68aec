"""Answers that were used already, computed again by somebody else, to find who is wrong.

By another member of the class, bit by bit; where two differ, or there is no other, the backbone judges: by bits where
this machine can compute in the class, else by what the class promises of its rows. Nobody waits for any of this.
Legend: P pairs of (row, expert), R rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kernels.interface import F32, I32

from .apart import Apart, Question
from .audit import Sampler
from .batch import Batch
from .calls import Call
from .dispatch import Dispatcher
from .oracle import Oracle, distance, same_bits
from .probing import Todo
from .roster import Peer, Roster


@dataclass(frozen=True, slots=True)
class Finding:
    """Rows that are wrong."""

    layer: int
    expert: int
    error: float  #: relative L2 distance from float64 of the row that is farthest off
    call: int  #: which of its worker's calls it was; 0: a call that audited another worker


@dataclass(slots=True)
class _Audit:
    """An answer, as much of it as is computed again, until there is a verdict."""

    peer: Peer
    numeric_class: str
    call: Call
    number: int  #: of its worker's calls
    x: F32  # [R, D]
    pairs: I32  # [P, 2]
    given: F32  # [P, D]
    left: set[int] = field(default_factory=set)  #: experts without a verdict
    is_bad: bool = False


class Auditor:
    """Takes some answers, has them computed again, and says what was found.

    `on_guilty` is told whose rows are wrong; `todo` puts off what the backbone computes itself.
    """

    def __init__(
        self,
        sampler: Sampler,
        apart: Apart,
        oracle: Oracle,
        dispatcher: Dispatcher,
        roster: Roster,
        *,
        todo: Todo,
        on_guilty: Callable[[Peer, Finding], None],
    ) -> None:
        self._sampler, self._apart, self._oracle = sampler, apart, oracle
        self._dispatcher, self._roster = dispatcher, roster
        self._todo, self._on_guilty = todo, on_guilty

    def served(self, peer: Peer, call: Call, batch: Batch, rows: F32) -> None:
        """A worker's rows [P, D] for a call came and were used."""
        if not self._sampler.takes(peer.name):
            return
        places = batch.places(call.experts)
        chosen = self._sampler.rows(batch.experts_at(places))
        x, pairs = batch.request_at(places[chosen])
        experts = set(pairs[:, 1].tolist())
        number = peer.report.calls
        audit = _Audit(peer, peer.report.numeric_class, call, number, x.copy(), pairs, rows[chosen], experts)
        able = {e: self._dispatcher.others(peer.name, call.layer, e) for e in sorted(experts)}
        for checker, theirs in self._sampler.checkers(able).items():
            self._ask(audit, checker, theirs)
        for expert in [e for e in sorted(experts) if not able[e]]:
            self._put_off(audit, expert)

    def _ask(self, audit: _Audit, checker: str, experts: list[int]) -> None:
        at = np.nonzero(np.isin(audit.pairs[:, 1], experts))[0]
        rows, of_row = np.unique(audit.pairs[at, 0], return_inverse=True)
        pairs = np.stack([of_row.reshape(-1).astype(np.int32), audit.pairs[at, 1]], axis=1)

        def alone() -> None:
            for expert in experts:
                self._put_off(audit, expert)

        def compare(again: F32) -> None:
            other = self._roster.named(checker)
            if other.report.numeric_class != audit.numeric_class:  # it was found out meanwhile
                alone()
                return
            for expert in experts:
                mine = audit.pairs[at, 1] == expert
                if same_bits(again[mine], audit.given[at[mine]]):
                    self._settle(audit, expert)
                else:
                    self._put_off(audit, expert, other, again[mine])

        question = Question(audit.x[rows], pairs, compare, alone)
        if not self._apart.ask(checker, audit.call.layer, audit.call.width, question):
            alone()

    def _put_off(self, audit: _Audit, expert: int, other: Peer | None = None, again: F32 | None = None) -> None:
        self._todo(lambda: self._judge(audit, expert, other, again))

    def _judge(self, audit: _Audit, expert: int, other: Peer | None, again: F32 | None) -> None:
        """The backbone's verdict on one expert's rows, and on those of whoever computed them again."""
        layer, at = audit.call.layer, np.nonzero(audit.pairs[:, 1] == expert)[0]
        x, given = audit.x[audit.pairs[at, 0]], audit.given[at]
        own = self._oracle.rows(audit.numeric_class, layer, expert, x)
        if self._is_wrong(audit, layer, expert, x, given, own):
            if not audit.is_bad:
                audit.is_bad = True
                audit.peer.report.audits += 1
                audit.peer.report.audits_failed += 1
            self._found(audit.peer, audit, Finding(layer, expert, self._error(layer, expert, x, given), audit.number))
        if other is not None and again is not None and self._is_wrong(audit, layer, expert, x, again, own):
            self._found(other, audit, Finding(layer, expert, self._error(layer, expert, x, again), 0))
        self._settle(audit, expert)

    def _is_wrong(self, audit: _Audit, layer: int, expert: int, x: F32, rows: F32, own: F32 | None) -> bool:
        """`own`: the rows in the audited class, or None where this machine cannot compute in it."""
        if own is not None:
            return not same_bits(rows, own)
        # Near to the backbone's own rows is near enough to the exact ones, which take much longer to compute.
        near = self._oracle.rows(self._oracle.own_class, layer, expert, x)
        if near is not None and distance(rows, near) <= audit.peer.bar / 2:
            return False
        return self._error(layer, expert, x, rows) > audit.peer.bar

    def _error(self, layer: int, expert: int, x: F32, rows: F32) -> float:
        return self._oracle.error(layer, expert, x, rows)

    def _found(self, peer: Peer, audit: _Audit, finding: Finding) -> None:
        if peer.report.numeric_class == audit.numeric_class:
            self._on_guilty(peer, finding)

    def _settle(self, audit: _Audit, expert: int) -> None:
        audit.left.discard(expert)
        if audit.left:
            return
        self._sampler.closed()
        if not audit.is_bad:
            audit.peer.report.audits += 1
            audit.peer.sure_calls = max(audit.peer.sure_calls, audit.number)
