"""Which answers are computed again, and which of their rows: drawn so that no worker can know. Pure.

An answer is drawn with a chance of 1 in N, by itself: whoever is always wrong is met within 160 calls with a chance
of 1 - (31/32)^160, which is above 99%; so is a single bad expert within 160 calls of it, for at least one row of each
expert of an answer is computed again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

EVERY = 32  #: calls of which one is computed again, on average
MOST_OPEN = 8  #: answers that may wait for their verdict
ALL_ROWS = 16  #: an answer with no more rows than this is computed again as a whole


class Sampler:
    """Draws answers. `every`: 1 in so many is taken; 0: none."""

    def __init__(self, every: int, draw: random.Random, *, most_open: int = MOST_OPEN) -> None:
        self._every, self._draw, self._most_open = every, draw, most_open
        self._open = 0
        self._owed: set[str] = set()  #: workers of which one was drawn while too many were open

    def takes(self, worker: str) -> bool:
        """A worker's answer came; whether it is computed again. Each one taken is to be `closed`."""
        is_drawn = bool(self._every) and self._draw.randrange(self._every) == 0
        if not is_drawn and worker not in self._owed:
            return False
        if self._open >= self._most_open:
            self._owed.add(worker)
            return False
        self._owed.discard(worker)
        self._open += 1
        return True

    def rows(self, experts: Sequence[int]) -> list[int]:
        """Which rows of an answer, whose experts these are: all where they are few, else one of each expert."""
        if len(experts) <= ALL_ROWS:
            return list(range(len(experts)))
        of: dict[int, list[int]] = {}
        for place, expert in enumerate(experts):
            of.setdefault(expert, []).append(place)
        return sorted(self._draw.choice(places) for places in of.values())

    def checkers(self, able: dict[int, list[str]]) -> dict[str, list[int]]:
        """Who computes which experts again, of those who are able to; by one alone where one can do all."""
        alone = set[str].intersection(*map(set, able.values())) if able else set[str]()
        chosen: dict[str, list[int]] = {}
        one = self._draw.choice(sorted(alone)) if alone else None
        for expert, names in able.items():
            if names:
                chosen.setdefault(one or self._draw.choice(names), []).append(expert)
        return chosen

    def closed(self) -> None:
        """There is a verdict on one."""
        self._open -= 1
