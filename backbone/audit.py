"""Which answers are computed again, and which of their rows: drawn so that no worker can know. Pure.

An answer is drawn with a chance of 1 in N, by itself: whoever is wrong in every row is met within 160 calls with a
chance of 1 - (31/32)^160, which is above 99%; so is a single bad expert within 160 calls of it, for at least one row of
each expert of an answer is computed again. Of an answer with some wrong rows those are met according to the share of
its rows that is computed again.

Two members of a class that are wrong alike agree when one checks the other. So of the answers that a member computes
again, 1 in JUDGED is looked at by the backbone as well: such a pair is met within 588 of its calls with a chance of
1 - (127/128)^588, which is above 99%.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

EVERY = 32  #: calls of which one is computed again, on average
MOST_OPEN = 8  #: answers that may wait for their verdict
JUDGED = 4  #: answers that a member computes again of which the backbone looks at one as well, on average
OWN_ROWS = 16  #: of an answer that the backbone computes again by itself, or one of each expert where those are more
#: Input and rows of an answer that another worker computes again. While it is open, those are kept, and once more what
#: the other is asked or answers: at most 2 x 4 MiB for each of MOST_OPEN, 64 MiB in all; more only where one row of
#: each expert is more.
MOST_BYTES = 4 << 20


def room(inputs: int, width: int, out_width: int, most_bytes: int = MOST_BYTES) -> int:
    """How many rows of `out_width` fit, with what they are computed from: at most so many inputs of `width`."""
    most = most_bytes // 4
    return max(most // (width + out_width), (most - inputs * width) // out_width)


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

    def is_judged(self) -> bool:
        """Whether the backbone looks at an answer that a member computes again, though the two agree."""
        return self._draw.randrange(JUDGED) == 0

    def rows(self, experts: Sequence[int], most: int = OWN_ROWS) -> list[int]:
        """Which rows of an answer, whose experts these are: so many, but at least one of each expert."""
        if len(experts) <= most:
            return list(range(len(experts)))
        of: dict[int, list[int]] = {}
        for place, expert in enumerate(experts):
            of.setdefault(expert, []).append(place)
        chosen = {self._draw.choice(places) for places in of.values()}
        others = [place for place in range(len(experts)) if place not in chosen]
        return sorted([*chosen, *self._draw.sample(others, max(0, most - len(chosen)))])

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
