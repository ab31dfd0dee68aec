"""Several answers at once on one engine: a thread that owns it, and with it the swarm's sockets, runs step after step.

Others hand in jobs and get events back; whatever else they want of the engine they have done between two steps
(`call`). A row's bits do not depend on its batch, so an answer is the one that it would be alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kernels.errors import KernelError
from kernels.interface import F32
from kernels.state import Rows, Sequence

from .engine import GenerateOptions, Turn, common_prefix
from .errors import BackboneError
from .forecast import TokenTimes
from .results import Before, Result, as_json
from .schedule import Piece, Schedule
from .session import Session
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_S = 1.0  #: between two looks at workers whose end nobody tells


class Busy(BackboneError):
    """As many answers are under way, and wait, as may be."""


class Ending(BackboneError):
    """The scheduler ends, or ended this job before its turn."""


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer's text became certain."""

    text: str


@dataclass(frozen=True, slots=True)
class Prompted:
    """So much of the prompt has been run."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer has ended. `result` is all but its provenance; of its prompt `cached` tokens were not run again."""

    result: Result
    cached: int


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no answer."""

    error: BackboneError


Event = Text | Prompted | Done | Failed


@dataclass(slots=True, eq=False)
class Job:
    """A prompt to answer. `emit` is called by the scheduler's thread: it has to be quick, and may not raise."""

    prompt_ids: list[int]
    options: GenerateOptions
    emit: Callable[[Event], None]


@dataclass(slots=True, eq=False)
class _Underway:
    """A job that has begun."""

    job: Job
    turn: Turn
    cached: int
    before: Before
    token: int | None = None  #: to be run next, once its prompt has been

    def next_tokens(self, start: int, count: int) -> list[int]:
        """The tokens to run, `start` after those that were run."""
        return self.turn.left[start : start + count] if self.token is None else [self.token]


@dataclass(slots=True)
class Counts:
    """What has been done since the start."""

    answers: Counter[str] = field(default_factory=Counter)  #: by why they stopped, or "failed"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    refused: int = 0  #: requests for which there was no place

    def as_json(self) -> Result:
        """The counts as plain data."""
        names = ("prompt_tokens", "cached_tokens", "answer_tokens", "refused")
        return {"answers": dict(self.answers), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much there is to do."""

    running: int
    waiting: int
    kept: int  #: sequences of earlier answers, for prompts that begin alike
    parallel: int
    queue: int


class Scheduler:
    """A context manager: within the block its thread runs, and nobody else touches the session's engine."""

    def __init__(self, session: Session, tokenizer: Tokenizer, *, parallel: int, queue: int) -> None:
        self._session, self._tokenizer = session, tokenizer
        self._parallel, self._queue = parallel, queue
        self._schedule = Schedule[Job](parallel)
        self._underway: dict[Job, _Underway] = {}
        self._kept: list[Sequence] = []  #: of ended answers, the oldest first
        self.token_times = TokenTimes()
        self._classes = ""  #: digest of the class map that all that is kept is of, and who had been found wrong
        self._inbox = deque[Callable[[], None]]()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._places, self._lock = 0, threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.counts = Counts()

    def __enter__(self) -> Scheduler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel what is under way and end the thread; whoever enters the block owns the engine again."""
        with contextlib.suppress(BackboneError):  # it has ended by itself
            self.cancel_all()
            self._post(self._stop)
        self._thread.join()
        os.close(self._wake_in)
        os.close(self._wake_out)

    # ---- for any thread

    @property
    def is_alive(self) -> bool:
        """Whether jobs are worked on."""
        return self._thread.is_alive() and not self._is_stopping

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the places for jobs that run or wait. Busy when all are taken."""
        most = self._parallel + self._queue
        with self._lock:
            if self._places >= most:
                self.counts.refused += 1
                raise Busy(f"{most} requests are under way or wait; try again later")
            self._places += 1
        try:
            yield
        finally:
            with self._lock:
                self._places -= 1

    def submit(self, job: Job) -> None:
        """Hand in a job; its events end with Done or Failed."""
        self._post(lambda: self._schedule.submit(job))

    def cancel(self, job: Job) -> None:
        """End a job before the next step; it gets its Done, stopped as "cancelled". Nothing when it has ended."""
        self._post(lambda: self._cancel(job))

    def cancel_all(self) -> None:
        """End all jobs before the next step."""
        self._post(self._cancel_all)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have something done that touches the session, between two steps."""
        future = Future[T]()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self._post(run)
        return future

    def load(self) -> Load:
        """How much there is to do; for `call`."""
        return Load(
            running=self._schedule.running,
            waiting=self._schedule.waiting,
            kept=len(self._kept),
            parallel=self._parallel,
            queue=self._queue,
        )

    def _post(self, function: Callable[[], None]) -> None:
        if self._is_stopping:
            raise Ending("the server is ending")
        self._inbox.append(function)
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it will wake without this byte
            os.write(self._wake_in, b"\0")

    # ---- the thread

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.critical("the engine's thread ends", exc_info=error)
            for job in list(self._schedule):
                job.emit(Failed(BackboneError("the server failed; its log says how")))
        finally:
            self._is_stopping = True
            self._take_in()  # nobody waits for what is never done

    def _work(self) -> None:
        while not self._is_stopping:
            if self._schedule.is_idle and not self._inbox:
                self._idle()
            self._take_in()
            while (job := self._schedule.next_waiting()) is not None:
                self._begin(job)
            if batches := self._schedule.next_step():
                self._step(batches)

    def _idle(self) -> None:
        if self._session.swarm is not None:
            self._session.swarm.serve_due(IDLE_S, self._wake_out)
        else:
            select.select([self._wake_out], [], [])

    def _take_in(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 4096)
        while self._inbox:
            self._inbox.popleft()()

    def _stop(self) -> None:
        self._is_stopping = True

    def _begin(self, job: Job) -> None:
        engine = self._session.engine
        try:
            engine.refuse_unfit(job.prompt_ids)
            sequence = self._kept_for(job.prompt_ids) or engine.new_sequence()
            cached = len(sequence.tokens)
            turn = Turn(
                engine,
                job.prompt_ids,
                self._tokenizer,
                job.options,
                sequence=sequence,
                on_text=lambda text: job.emit(Text(text)),
            )
        except BackboneError as error:
            self.counts.answers["failed"] += 1
            job.emit(Failed(error))
            return
        self._underway[job] = _Underway(job, turn, cached, Before.now(self._session))
        self._schedule.begin(job, len(turn.left))

    def _kept_for(self, prompt_ids: list[int]) -> Sequence | None:
        """A kept sequence that saves a good part of a prompt; sequences that are kept and in use are never too many."""
        classes = f"{self._session.class_map().digest} {self._session.engine.experts.doubts}"
        if classes != self._classes:  # what was kept is of an earlier class map, or of somebody who was wrong
            self._kept.clear()
            self._classes = classes
        shared = [common_prefix(sequence.tokens, prompt_ids) for sequence in self._kept]
        best = max(range(len(shared)), key=shared.__getitem__, default=None)
        if best is not None and shared[best] * 4 >= len(prompt_ids):
            sequence = self._kept.pop(best)
            sequence.truncate(shared[best])
            return sequence
        while self._kept and len(self._kept) + self._schedule.running >= self._parallel:
            del self._kept[0]
        return None

    def _step(self, batches: list[list[Piece[Job]]]) -> None:
        """Run batches; where that fails, each job's part alone, so that no job fails by another's fault."""
        jobs = list(dict.fromkeys(piece.job for batch in batches for piece in batch))
        try:
            found = self._logits(batches)
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error)
            else:
                for job in jobs:
                    self._step([mine for batch in batches if (mine := [piece for piece in batch if piece.job is job])])
            return
        for job in jobs:
            under = self._underway[job]
            try:
                self._advance(under, found.get(job))
            except Exception as error:
                self._fail(job, error)

    def _logits(self, batches: list[list[Piece[Job]]]) -> dict[Job, F32]:
        """Logits [vocabulary] of each job whose prompt is run with it, or that is being answered."""
        started, rows, wanted_by = Counter[Job](), list[Rows](), list[list[Job]]()
        for batch in batches:
            tokens, positions, sequences = list[int](), list[int](), list[Sequence]()
            wanted, jobs = list[int](), list[Job]()
            for piece in batch:
                under = self._underway[piece.job]
                turn, start = under.turn, started[piece.job]
                first = len(turn.sequence.tokens) + start
                tokens += under.next_tokens(start, piece.count)
                positions += range(first, first + piece.count)
                sequences += [turn.sequence] * piece.count
                started[piece.job] += piece.count
                if under.token is not None or start + piece.count == len(turn.left):
                    wanted.append(len(tokens) - 1)
                    jobs.append(piece.job)
            ids, at = np.array(tokens, np.int32), np.array(positions, np.int64)
            rows.append(Rows(ids, at, sequences, np.array(wanted, np.intp)))
            wanted_by.append(jobs)
        # All of them, before any answer goes on: what fails is forgotten whole.
        is_single = len(rows) == 1 and len(rows[0]) == 1
        started_s = time.perf_counter()
        logits = list(self._session.engine.run_batches(rows, clock=self.token_times.clock if is_single else None))
        if is_single:
            self.token_times.add(time.perf_counter() - started_s)
        return {job: row for jobs, of in zip(wanted_by, logits, strict=True) for job, row in zip(jobs, of, strict=True)}

    def _advance(self, under: _Underway, row: F32 | None) -> None:
        job, turn = under.job, under.turn
        if under.token is None:
            job.emit(Prompted(len(turn.sequence.tokens), len(job.prompt_ids)))
        if row is None:
            return
        if under.token is None:
            self._schedule.answering(job)
        under.token = turn.advance(row)
        if under.token is None:
            self._end(under)

    # ---- ends

    def _end(self, under: _Underway) -> None:
        under.turn.finish()
        answer, counts = under.turn.answer, self.counts
        counts.answers[answer.stop] += 1
        counts.prompt_tokens += answer.prompt.tokens
        counts.cached_tokens += under.cached
        counts.answer_tokens += answer.decode.tokens
        self._forget(under)
        if under.turn.sequence.tokens and not answer.class_changes and not answer.is_in_doubt:
            self._kept.append(under.turn.sequence)
        under.job.emit(Done(as_json(self._session, answer, under.before), under.cached))

    def _cancel_all(self) -> None:
        for job in list(self._schedule):
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        if (under := self._underway.get(job)) is not None:
            under.turn.cancel()
            self._end(under)
        elif job in list(self._schedule):
            self._schedule.remove(job)
            self.counts.answers["cancelled"] += 1
            job.emit(Failed(Ending("the request was cancelled before its turn came")))

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, BackboneError):
            if not isinstance(error, KernelError):
                log.error("a step failed", exc_info=error)
            error = BackboneError(f"the request failed: {error or type(error).__name__}")
        self.counts.answers["failed"] += 1
        self._forget(self._underway[job])
        job.emit(Failed(error))

    def _forget(self, under: _Underway) -> None:
        del self._underway[under.job]
        self._schedule.remove(under.job)
