"""What failures cost: calls that others had to do, how long they were waited for, and what the backbone did itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Of one worker, over all its sessions."""

    retried: int = 0  #: its calls that others did, since it was lost, sent garbage, refused or stalled
    hedged_won: int = 0  #: its calls that took long and were given to another too, and that it answered first
    hedged_lost: int = 0  #: of which the other was first
    waited_s: float = 0.0  #: for calls of it that were given up: those retried, and those that a hedge took over

    def add(self, other: Tally) -> None:
        """Count what another's failures cost, too."""
        self.retried += other.retried
        self.hedged_won += other.hedged_won
        self.hedged_lost += other.hedged_lost
        self.waited_s += other.waited_s
