"""Whose tokens run next, when several answers are made at once. Pure: knows rows and turns, no engine and no time.

Every answer in the making gets one row a step. Beside them prompts are run in pieces, in rotation, so that a long
prompt holds up neither the answers nor the prompts behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from .engine import CHUNK_ROWS

BESIDE_ROWS = 128  #: of prompts in a step in which answers go on: what a token may have to wait for
Job = TypeVar("Job", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Piece(Generic[Job]):
    """The next `count` tokens of a job."""

    job: Job
    count: int


class Schedule(Generic[Job]):
    """Jobs that wait, jobs whose prompt is being run, jobs that are being answered."""

    def __init__(self, most: int, *, chunk_rows: int = CHUNK_ROWS, beside_rows: int = BESIDE_ROWS) -> None:
        self._most, self._chunk_rows, self._beside_rows = most, chunk_rows, beside_rows
        self._waiting = deque[Job]()
        self._left: dict[Job, int] = {}  #: tokens of its prompt that are not run; the first job's turn is next
        self._answering: dict[Job, None] = {}

    @property
    def running(self) -> int:
        """Jobs that are under way."""
        return len(self._left) + len(self._answering)

    @property
    def waiting(self) -> int:
        """Jobs that are not."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._left or self._answering)

    def __iter__(self) -> Iterator[Job]:
        """All jobs: answered, in their prompt, waiting."""
        yield from [*self._answering, *self._left, *self._waiting]

    def submit(self, job: Job) -> None:
        """A job comes in, behind those that wait."""
        self._waiting.append(job)

    def next_waiting(self) -> Job | None:
        """The job that can begin now; None when no other can run beside those that do. `begin` has to follow."""
        return self._waiting.popleft() if self._waiting and self.running < self._most else None

    def begin(self, job: Job, tokens: int) -> None:
        """A job begins, with so many tokens of its prompt to run."""
        self._left[job] = tokens

    def remove(self, job: Job) -> None:
        """A job has ended, wherever it was."""
        self._left.pop(job, None)
        self._answering.pop(job, None)
        if job in self._waiting:
            self._waiting.remove(job)

    def next_step(self) -> list[list[Piece[Job]]]:
        """The batches to run next, which may be under way at once; none: no job is under way.

        Answers come first, one row each. Prompts share what rows there are, the first in rotation before the others;
        who is not done with it goes behind them.
        """
        answers = [Piece(job, 1) for job in self._answering]
        if answers:
            beside = self._prompts(self._beside_rows)
            return [answers, beside] if beside else [answers]
        # Two batches: one computes its dense layers while the other waits for its experts.
        return [batch for _ in range(2) if (batch := self._prompts(self._chunk_rows))]

    def _prompts(self, rows: int) -> list[Piece[Job]]:
        pieces = list[Piece[Job]]()
        for job in [job for job, left in self._left.items() if left]:
            count = min(rows, self._left[job])
            if count:
                pieces.append(Piece(job, count))
                self._left[job] = self._left.pop(job) - count
                rows -= count
        return pieces

    def answering(self, job: Job) -> None:
        """A job's prompt has been run: from now on it gets a row a step."""
        del self._left[job]
        self._answering[job] = None
