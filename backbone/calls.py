"""What the dispatcher knows and wants done: calls, tickets, members; and its actions, which the shell carries out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from .class_map import ClassMap
from .pace import Pace


@dataclass(frozen=True, slots=True)
class Call:
    """What one worker is asked for of a ticket."""

    seq: int
    ticket: int
    worker: str
    layer: int
    epoch: int
    experts: tuple[int, ...]
    pairs: int  #: rows that the answer has
    width: int  #: values that each of them has
    deadline_s: float


# ---- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send the call to its worker, without blocking; report `unsent` or `lost` when it does not go."""

    call: Call


@dataclass(frozen=True, slots=True)
class Fill:
    """The rows that came are the call's: put them in place."""

    call: Call
    only: tuple[int, ...] | None = None  #: of its experts, when others have done the rest


@dataclass(frozen=True, slots=True)
class ComputeLocally:
    """Compute these experts here, and report each as `computed`."""

    ticket: int
    layer: int
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spare:
    """These experts need not be computed here any more."""

    ticket: int
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Every row of the ticket is in place."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ReportLost:
    """A worker gets no more calls. One that is not trusted may not come back in this run either."""

    worker: str
    session: int  #: which one ended; another may have begun since
    reason: str
    is_trusted: bool


@dataclass(frozen=True, slots=True)
class NewMap:
    """Of these (layer, expert) no member of the class is left: they are of the backbone's class from here on."""

    experts: tuple[tuple[int, int], ...]
    before: ClassMap
    after: ClassMap


@dataclass(frozen=True, slots=True)
class ReportDropped:
    """An answer that nobody waits for: too late, twice, or never asked for."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The rows of a call that was asked apart came, finite or not: whoever asked for them may look at them."""

    call: Call


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """A call that was asked apart will not be answered: its worker was lost, or does not take it."""

    call: Call


Action = Send | Fill | ComputeLocally | Spare | Complete | ReportLost | NewMap | ReportDropped | Checked | CheckFailed

APART = 0  #: in place of a ticket: a call for whose rows no layer waits


class Standing(Enum):
    """Whether a worker gets calls."""

    SERVING = "serving"
    STALLED = "stalled"  #: its queue is full; it serves again when it answers
    SUSPECT = "suspect"  #: it sent rows that are not finite; whose fault that is will be seen
    LOST = "lost"


class Cause(Enum):
    """Why the backbone computes what a worker might have."""

    UNHELD = "unheld"  #: no worker of the class serves it
    LOST = "lost"  #: the worker died, left, or its connection is gone
    LATE = "late"  #: the deadline passed
    GARBAGE = "garbage"
    NOT_FINITE = "not finite"
    REFUSED = "refused"
    DEMOTED = "demoted"  #: the worker's rows are not of the class that it said
    STALLED = "stalled"
    HEDGED = "hedged"  #: it took long, and whoever was first counted
    STRAGGLING = "straggling"  #: whoever holds it has not answered a call that was hedged before


@dataclass(frozen=True, slots=True)
class Held:
    """Experts of a layer that a worker has loaded, and the epoch of their assignment."""

    epoch: int
    experts: frozenset[int]
    is_proven: bool = True  #: its rows of experts like these were measured; before that it serves none of them


@dataclass(slots=True)
class Member:
    """A worker as the dispatcher sees it, in one session of it."""

    name: str
    numeric_class: str
    session: int
    holds: dict[int, Held] = field(default_factory=dict)  #: by layer
    standing: Standing = Standing.SERVING
    in_flight: set[int] = field(default_factory=set)
    pace: Pace = field(default_factory=Pace)
    heard_s: float = -math.inf  #: when it answered last
    worked_s: float = 0.0  #: what all had worked by then
    free_s: float = -math.inf  #: when it has done all that it was asked for, as far as that is known
    strays: int = 0  #: calls in flight that others, who were asked too, did first
    late: int = 0  #: calls that another did first, since the last that it answered in time
    shunned_until_s: float = -math.inf

    def answered(self, call: Call, sent_s: float, now_s: float, compute_s: float, worked_s: float) -> None:
        """It answered a call: what that says of its pace. `worked_s`: by all members before this answer."""
        round_trip_s, since_last_s, others_s = now_s - sent_s, now_s - self.heard_s, worked_s - self.worked_s
        self.pace.answered(len(call.experts), call.pairs, round_trip_s, since_last_s, compute_s, others_s)
        self.heard_s, self.worked_s = now_s, worked_s + round_trip_s
        if not self.in_flight:
            self.free_s = -math.inf


@dataclass(slots=True)
class Flight:
    """A call until its worker answers."""

    call: Call
    sent_s: float
    hedge_s: float  #: when others are asked too; infinite when they were, or are not to be
    due_s: float  #: that, or the call's deadline
    is_hedged: bool = False
    is_stray: bool = False  #: nobody waits for it: others have done all of it, or it was asked apart


@dataclass(slots=True)
class Suspicion:
    """A member's rows were not finite, of experts of which some have yet to be done by somebody else."""

    member: Member
    reason: str
    experts: set[int]


@dataclass(slots=True)
class Ticket:
    """What a layer asked for."""

    layer: int
    load: Mapping[int, int]  #: expert to its rows
    width: int
    left: set[int]  #: experts that are not done yet
    here: set[int] = field(default_factory=set)  #: of these, those that are to be computed here
    checked: set[int] = field(default_factory=set)  #: those computed here, of another class than ours: finite
    suspicions: list[Suspicion] = field(default_factory=list)
    is_hedged: bool = False

    @property
    def unclear(self) -> set[int]:
        """Experts of which somebody gave rows that were not finite, and nobody others yet."""
        return {expert for suspicion in self.suspicions for expert in suspicion.experts}
