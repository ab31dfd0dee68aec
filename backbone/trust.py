"""Whom to believe: workers are measured when they join, and audited while they serve; who does not keep its word pays.

A worker whose rows are not what its numeric class promises is of a class of its own from then on, so that it counts as
a member of no honest one; one that is unfit is asked for nothing more.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernels.interface import F32, I32
from protocol.schema import one_line

from .apart import Apart, Question
from .audit import EVERY, Sampler
from .auditor import Auditor, Finding
from .batch import Batch
from .calls import Action, Call, Checked, CheckFailed
from .dispatch import Dispatcher
from .errors import BackboneError
from .joining import Joining
from .oracle import Judged, Kind, Oracle
from .probing import Measure, Prober
from .ranks import Rank, rank_of
from .roster import Peer, Roster
from .wire import Wire

log = logging.getLogger(__name__)

MOST_WAITING = 16  #: experts whose rows wait to be looked at; audits that wait for them keep others from being begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """How workers are checked. Without probes each is taken at its word, which is for measurements of other things."""

    every: int = EVERY  #: one in so many answers is audited; 0: none
    is_probing: bool = True
    seed: int | None = None  #: of which answers are audited; None: a secret one


class Trust:
    """Probes and audits of one swarm. `act` carries the dispatcher's actions out."""

    def __init__(
        self,
        checks: Checks,
        model: Judged,
        dispatcher: Dispatcher,
        roster: Roster,
        joining: Joining,
        act: Callable[[Sequence[Action]], None],
        wire: Wire = Wire(),  # noqa: B008 - frozen
    ) -> None:
        self._dispatcher, self._joining, self._act, self._model = dispatcher, joining, act, model
        self._roster = roster
        self._liars = set[str]()  #: whom audits found wrong: what they vouched for is in doubt
        self.demotions = self.caught = 0  #: of anybody; and of those whose rows had been used
        self._todo = deque[Callable[[], None]]()
        self._apart = Apart(dispatcher, act)
        oracle, todo = Oracle(model), self._todo.append
        self._prober = Prober(
            self._apart,
            oracle,
            joining.kinds,
            model.expert_width,
            todo=todo,
            on_found=self._on_measured,
            on_failed=self._on_no_probe,
        )
        # What is audited is drawn from the system, so that nobody can foresee it.
        draw = random.SystemRandom() if checks.seed is None else random.Random(checks.seed)  # noqa: S311 - for tests
        self._auditor = Auditor(
            *(Sampler(checks.every, draw), self._apart, oracle, dispatcher, roster, wire),
            todo=todo,
            on_guilty=self._on_guilty,
        )

    # ---- what the swarm tells

    def loaded(self, peer: Peer) -> None:
        """A worker may have loaded something."""
        self._prober.look_at(peer)

    def served(self, peer: Peer, call: Call, batch: Batch, rows: F32) -> None:
        """A worker's rows for a call were used."""
        self._auditor.served(peer, call, batch, rows)

    def came(self, action: Checked | CheckFailed, rows: F32 | None = None) -> None:
        """What became of a call that was asked apart."""
        if rows is not None and isinstance(action, Checked):
            self._apart.answered(action.call, rows)
        else:
            self._apart.failed(action.call)

    def request(self, call: Call) -> tuple[F32, I32]:
        """What the worker of a call that is asked apart needs: rows, and pairs of (row, expert)."""
        return self._apart.request(call)

    def is_exact(self, call: Call) -> bool:
        """Whether the answer to a call that is asked apart may not be rounded on its way."""
        return self._apart.is_exact(call)

    def rows_of(self, worker: str, layer: int, x: F32, pairs: I32, pump: Callable[[], object]) -> F32:
        """A worker's rows [P, D], asked for apart and waited for. BackboneError when they do not come."""
        found = list[F32 | None]()
        question = Question(x, pairs, lambda rows: found.append(rows.copy()), lambda: found.append(None))
        is_asked = self._apart.ask(worker, layer, self._model.expert_width(layer), question)
        while is_asked and not found:
            pump()
        if not is_asked or (rows := found[0]) is None:
            raise BackboneError(f"worker {worker} does not answer")
        return rows

    @property
    def has_work(self) -> bool:
        """Whether the backbone has something to look at."""
        return bool(self._todo)

    @property
    def is_behind(self) -> bool:
        """Whether so much waits that it is not put off any more until nothing else happens."""
        return len(self._todo) > MOST_WAITING

    def work(self) -> None:
        """Look at one expert's rows, if there are any to be looked at."""
        if self._todo:
            self._todo.popleft()()

    # ---- verdicts

    def _on_no_probe(self, peer: Peer) -> None:
        self._act(self._joining.lose(peer, "it takes no calls"))

    def _on_measured(self, peer: Peer, kind: Kind, found: Measure) -> None:
        """A worker's rows of one kind of experts were measured."""
        peer.measured.add(kind)
        peer.worst = max(peer.worst, found.worst)
        if found.is_same_bits is not None:
            peer.is_same_bits = peer.is_same_bits is not False and found.is_same_bits
        rank = self._rank(peer)
        is_near = peer.worst <= peer.promise.tolerance
        if peer.is_same_bits is False or (peer.is_same_bits is None and not is_near):
            told = f"probed, its rows are off by {found.worst:.2g} (worst row, relative L2)"
            if is_near:
                told += f" and not the bits of {peer.declared}, which it says that they are"
            else:
                told += f"; {peer.declared} promises {peer.promise.tolerance:.0e}"
            self._demote(peer, rank, told)
        if not peer.is_unfit:
            self._act(self._joining.proven(peer, kind))

    def _on_guilty(self, guilty: Sequence[tuple[Peer, Finding]]) -> None:
        """Rows of workers are wrong that were used, or that were to be the measure of another's."""
        liars = self._liars | {peer.name for peer, _ in guilty}
        for peer in self._roster:
            if peer.is_caught:  # whoever vouched for some of its calls may be found out only now
                peer.report.in_doubt += peer.vouched.sure(self._liars) - peer.vouched.sure(liars)
        self._liars = liars
        for peer, finding in guilty:
            self._accuse(peer, finding)

    def _accuse(self, peer: Peer, finding: Finding) -> None:
        peer.is_caught = True
        self.caught += 1
        peer.caught_worst = max(peer.caught_worst, finding.error)
        peer.report.in_doubt = peer.report.calls - peer.vouched.sure(self._liars)
        told = (
            f"audit: its rows of layer {finding.layer}, expert {finding.expert} are off by {finding.error:.2g} "
            f"(relative L2)"
        )
        if finding.error <= peer.bar:
            told += f" and not the bits of {peer.declared}"
        if not finding.call:
            told += ", in a call that checked another worker"
        if peer.report.calls:
            told += self._doubt(peer)
        self._demote(peer, self._rank(peer), told)

    def _doubt(self, peer: Peer) -> str:
        """What a worker's calls are worth that was found out. One right answer says nothing of those before it."""
        sure, last = peer.vouched.sure(self._liars), peer.vouched.last(self._liars)
        told = f"; all {peer.report.calls} calls that it has done are in doubt"
        if sure:
            told += f" but {sure} that were audited whole and right"
        ago = f"the last right audit was {peer.report.calls - last} calls ago" if last else "no audit of it was right"
        return f"{told}; {ago}"

    def _rank(self, peer: Peer) -> Rank:
        """By all that was found of a worker. One that keeps its class's word is no worse than its class."""
        is_same = bool(peer.is_same_bits) and not peer.is_caught
        rank = rank_of(max(peer.worst, peer.caught_worst), is_same_bits=is_same)
        is_kept = is_same or (peer.is_same_bits is None and peer.worst <= peer.promise.tolerance)
        if is_kept and not peer.is_caught and not rank.keeps(peer.promise):
            rank = peer.promise
        peer.rank = peer.report.rank = rank
        peer.report.error = max(peer.worst, peer.caught_worst)
        return rank

    def _demote(self, peer: Peer, rank: Rank, reason: str) -> None:
        """A worker is of a class of its own from here on; nothing happens when it is of that already."""
        kind = one_line(f"{peer.declared} measured {rank} of {peer.name}")
        if kind == peer.report.numeric_class:
            return
        what = "it is asked for nothing more" if rank is Rank.UNFIT else f"it counts as {rank}, in a class of its own"
        self.demotions += 1
        peer.note(reason, is_trusted=True)
        log.warning("worker %s is demoted: %s; %s", peer.name, reason, what)
        peer.report.numeric_class = kind
        self._act(self._dispatcher.reclassed(peer.name, peer.report.numeric_class, time.monotonic()))
        self._joining.demoted(peer)
