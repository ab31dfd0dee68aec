"""Answers that were used already, computed again by somebody else, to find who is wrong.

By another member of the class, bit by bit; where two differ, or there is no other, and sometimes where they agree, the
backbone judges: by bits where this machine can compute in the class, else by what the class promises of its rows.
Nobody waits for any of this. Legend: P pairs of (row, expert), R rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.interface import F32, I32

from .apart import Apart, Question
from .audit import Sampler, room
from .batch import Batch, Places
from .calls import Call
from .dispatch import Dispatcher
from .oracle import Oracle, differing, same_bits
from .probing import Todo
from .roster import Peer, Roster
from .wire import Wire

Flags = NDArray[np.bool_]


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
    is_own: Flags  # [P], those that the backbone computes where it does
    is_judged: bool  #: by the backbone, though another agrees
    is_whole: bool  #: every row of the answer is computed again
    left: set[int] = field(default_factory=set)  #: experts without a verdict
    vouchers: set[str] = field(default_factory=set)  #: workers whose rows were the measure of some
    is_bad: bool = False

    def of(self, expert: int) -> Places:
        """The places of an expert's rows."""
        return np.nonzero(self.pairs[:, 1] == expert)[0]


class Auditor:
    """Takes some answers, has them computed again, and says what was found.

    `on_guilty` is told whose rows are wrong, of all at once whom one look has found; `todo` puts off what the backbone
    computes itself.
    """

    def __init__(
        self,
        sampler: Sampler,
        apart: Apart,
        oracle: Oracle,
        dispatcher: Dispatcher,
        roster: Roster,
        wire: Wire = Wire(),  # noqa: B008 - frozen
        *,
        todo: Todo,
        on_guilty: Callable[[Sequence[tuple[Peer, Finding]]], None],
    ) -> None:
        self._sampler, self._apart, self._oracle = sampler, apart, oracle
        self._dispatcher, self._roster, self._wire = dispatcher, roster, wire
        self._todo, self._on_guilty = todo, on_guilty

    def served(self, peer: Peer, call: Call, batch: Batch, rows: F32) -> None:
        """A worker's rows [P, D] for a call came and were used."""
        if not self._sampler.takes(peer.name):
            return
        able = {e: self._dispatcher.others(peer.name, call.layer, e) for e in sorted(call.experts)}
        checkers = self._sampler.checkers(able)
        audit = self._taken(peer, call, batch, rows, able)
        for checker, theirs in checkers.items():
            self._ask(audit, checker, theirs)
        for expert in [e for e in sorted(audit.left) if not able[e]]:
            self._put_off(audit, expert, audit.of(expert))

    def _taken(self, peer: Peer, call: Call, batch: Batch, rows: F32, able: dict[int, list[str]]) -> _Audit:
        """What is computed again of an answer: by others as much as fits, by the backbone a few rows."""
        places = batch.places(call.experts)
        experts = batch.experts_at(places)
        mine, theirs = ([at for at, e in enumerate(experts) if bool(able[e]) == is_able] for is_able in (False, True))
        most = room(batch.inputs_at(places[theirs]), batch.x.shape[1], call.width)
        chosen = [theirs[n] for n in self._sampler.rows([experts[at] for at in theirs], most)]
        own = [group[n] for group in (mine, chosen) for n in self._sampler.rows([experts[at] for at in group])]
        kept = sorted({*chosen, *own})
        x, pairs = batch.request_at(places[kept])
        return _Audit(
            peer,
            peer.report.numeric_class,
            call,
            peer.report.calls,
            x.copy(),
            pairs,
            rows[kept],
            is_own=np.isin(kept, own),
            is_judged=self._sampler.is_judged(),
            is_whole=len(kept) == len(places),
            left=set(experts),
        )

    def _ask(self, audit: _Audit, checker: str, experts: list[int]) -> None:
        at = np.nonzero(np.isin(audit.pairs[:, 1], experts))[0]
        rows, of_row = np.unique(audit.pairs[at, 0], return_inverse=True)
        pairs = np.stack([of_row.reshape(-1).astype(np.int32), audit.pairs[at, 1]], axis=1)

        def alone() -> None:
            for expert in experts:
                self._put_off(audit, expert, self._few(audit, audit.of(expert)))

        def compare(again: F32) -> None:
            other = self._roster.named(checker)
            if other.report.numeric_class != audit.numeric_class:  # it was found out meanwhile
                alone()
                return
            rounded = self._wire.rounded(again)  # as what is audited was, in whatever kind this came
            for expert in experts:
                self._compare(audit, expert, other, rounded[audit.pairs[at, 1] == expert])

        x = audit.x if len(rows) == len(audit.x) else audit.x[rows]
        question = Question(x, pairs, compare, alone, is_exact=False)
        if not self._apart.ask(checker, audit.call.layer, audit.call.width, question):
            alone()

    def _few(self, audit: _Audit, at: Places) -> Places:
        """Of some places those that the backbone computes; the rest of the answer then stays unknown."""
        few = at[audit.is_own[at]]
        audit.is_whole = audit.is_whole and len(few) == len(at)
        return few

    def _compare(self, audit: _Audit, expert: int, other: Peer, again: F32) -> None:
        """Another has computed an expert's rows again: where the two differ the backbone judges some of those."""
        at = audit.of(expert)
        apart = differing(again, audit.given[at])
        judged = {int(apart[n]) for n in self._sampler.rows([expert] * len(apart))}
        if audit.is_judged:
            judged.update(np.nonzero(audit.is_own[at])[0].tolist())
        if len(judged) < len(at):
            audit.vouchers.add(other.name)
        if judged:
            chosen = sorted(judged)
            self._put_off(audit, expert, at[chosen], other, again[chosen])
        else:
            self._settle(audit, expert)

    def _put_off(
        self, audit: _Audit, expert: int, at: Places, other: Peer | None = None, again: F32 | None = None
    ) -> None:
        self._todo(lambda: self._judge(audit, expert, at, other, again))

    def _judge(self, audit: _Audit, expert: int, at: Places, other: Peer | None, again: F32 | None) -> None:
        """The backbone's verdict on an expert's rows at some places, and on those of whoever computed them again."""
        layer, x, given = audit.call.layer, audit.x[audit.pairs[at, 0]], audit.given[at]
        own = self._oracle.rows(audit.numeric_class, layer, expert, x)
        own = None if own is None else self._wire.rounded(own)
        guilty: list[tuple[Peer, Finding]] = []
        if self._is_wrong(audit, layer, expert, x, given, own):
            if not audit.is_bad:
                audit.is_bad = True
                audit.peer.report.audits += 1
                audit.peer.report.audits_failed += 1
            guilty.append((audit.peer, Finding(layer, expert, self._error(layer, expert, x, given), audit.number)))
        if other is not None and again is not None and self._is_wrong(audit, layer, expert, x, again, own):
            guilty.append((other, Finding(layer, expert, self._error(layer, expert, x, again), 0)))
        # Whoever is of another class by now was found out already.
        guilty = [(peer, finding) for peer, finding in guilty if peer.report.numeric_class == audit.numeric_class]
        if guilty:
            self._on_guilty(guilty)
        self._settle(audit, expert)

    def _is_wrong(self, audit: _Audit, layer: int, expert: int, x: F32, rows: F32, own: F32 | None) -> bool:
        """`own`: the rows in the audited class, or None where this machine cannot compute in it."""
        if own is not None:
            return not same_bits(rows, own)
        # Near to the backbone's own rows is near enough to the exact ones, which take much longer to compute.
        near, bar = self._oracle.rows(self._oracle.own_class, layer, expert, x), audit.peer.bar
        if near is not None and self._wire.is_within(rows, near, bar / 2):
            return False
        with np.errstate(all="ignore"):
            return not self._wire.is_within(rows, self._oracle.exact(layer, expert, x), bar)

    def _error(self, layer: int, expert: int, x: F32, rows: F32) -> float:
        return self._oracle.error(layer, expert, x, rows)

    def _settle(self, audit: _Audit, expert: int) -> None:
        audit.left.discard(expert)
        if audit.left:
            return
        self._sampler.closed()
        if not audit.is_bad:
            audit.peer.report.audits += 1
            audit.peer.vouched.add(audit.number, frozenset(audit.vouchers), is_whole=audit.is_whole)
