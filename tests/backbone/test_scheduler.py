"""Several answers at once are those that each would be alone, to the bit; what one does costs the others nothing."""

from __future__ import annotations

import argparse
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backbone.class_map import MapChange
from backbone.engine import GenerateOptions
from backbone.errors import BackboneError, ContextFull
from backbone.results import change_lines
from backbone.sampling import SamplingOptions
from backbone.schedule import Schedule
from backbone.scheduler import IDLE_S, Busy, Done, Ending, Event, Failed, Job, Prompted, Scheduler, Text
from backbone.session import Session, open_session
from backbone.settings import resolve

DRAWN = SamplingOptions(temperature=1.2, top_k=50, seed=11, repeat_penalty=1.1)
OPTIONS = GenerateOptions(max_tokens=12, digest=True, ignore_eos=True)
PROMPTS = {
    "In the beginning": OPTIONS,
    "And the earth was without form": replace(OPTIONS, sampling=DRAWN),
    "noun: the state of " * 40: OPTIONS,
    "Let there be": replace(OPTIONS, max_tokens=3),
    "a": replace(OPTIONS, stop=("e",)),
    "And God said unto Noah, " * 12: replace(OPTIONS, sampling=DRAWN),
}


@pytest.fixture(scope="module", params=["0", "2"], ids=["here", "two workers"])
def session(request: pytest.FixtureRequest, compiled_kernels: Any) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(compiled_kernels.parents[1]))
        settings = resolve(argparse.Namespace(workers=request.param, context="2048", backend="native"), {})
        with open_session(settings) as session:
            yield session


class Inbox:
    """A job and what comes of it."""

    def __init__(self, session: Session, prompt: str | list[int], options: GenerateOptions = OPTIONS) -> None:
        ids = session.tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        self.events = queue.SimpleQueue[Event]()
        self.job = Job(ids, options, self.events.put)

    def next(self) -> Event:
        return self.events.get(timeout=60)

    def first_text(self) -> str:
        while not isinstance(event := self.next(), Text):
            assert isinstance(event, Prompted), event
        return event.text

    def end(self) -> Done | Failed:
        while not isinstance(event := self.next(), Done | Failed):
            pass
        return event


@contextmanager
def running(session: Session, parallel: int = 4, queue: int = 16) -> Iterator[Scheduler]:
    with Scheduler(session, session.tokenizer(), parallel=parallel, queue=queue) as scheduler:
        yield scheduler


def alone(session: Session, prompt: str, options: GenerateOptions) -> Any:
    return session.engine.generate(session.tokenizer().encode(prompt), session.tokenizer(), options)


@pytest.mark.parametrize("parallel", [1, 3, 6])
def test_answers_made_at_once_have_the_bits_of_each_alone(session: Session, parallel: int) -> None:
    expected = [alone(session, prompt, options) for prompt, options in PROMPTS.items()]
    with running(session, parallel) as scheduler:
        inboxes = [Inbox(session, prompt, options) for prompt, options in PROMPTS.items()]
        for inbox in inboxes:
            scheduler.submit(inbox.job)
        for inbox, answer in zip(inboxes, expected, strict=True):
            text, event = "", inbox.next()
            while not isinstance(event, Done):
                assert not isinstance(event, Failed)
                text += event.text if isinstance(event, Text) else ""
                event = inbox.next()
            result = event.result
            assert (result["ids"], result["text"], result["stop"]) == (answer.ids, answer.text, answer.stop)
            assert text == answer.text
            assert result["logits_sha256"] == answer.logits_sha256
        assert scheduler.call(scheduler.load).result(60).running == 0


def test_rows_of_several_answers_run_together(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[tuple[int, ...]]()
    run_batches = session.engine.run_batches

    def watched(batches: Any, **how: Any) -> Any:
        seen.add(tuple(len({id(s) for s in rows.sequences}) for rows in batches))
        return run_batches(batches, **how)

    monkeypatch.setattr(session.engine, "run_batches", watched)
    hold = threading.Event()
    with running(session) as scheduler:
        scheduler.call(lambda: hold.wait(60))  # until all are there
        inboxes = [Inbox(session, prompt) for prompt in ("a", "b", "c")]
        for inbox in inboxes:
            scheduler.submit(inbox.job)
        hold.set()
        for inbox in inboxes:
            assert isinstance(inbox.end(), Done)
    assert (3,) in seen


def test_a_long_prompt_does_not_hold_up_an_answer(session: Session) -> None:
    with running(session) as scheduler:
        steady = Inbox(session, "In the beginning", replace(OPTIONS, max_tokens=1500, digest=False))
        scheduler.submit(steady.job)
        steady.first_text()
        ended_first = queue.SimpleQueue[int]()

        def emit_of(length: int) -> Any:
            return lambda event: ended_first.put(length) if isinstance(event, Done) else None

        for length in (1500, 200):
            scheduler.submit(Job([300] * length, replace(OPTIONS, max_tokens=1), emit_of(length)))
        assert [ended_first.get(timeout=60) for _ in range(2)] == [200, 1500]
        scheduler.cancel(steady.job)
        ended = steady.end()
    assert isinstance(ended, Done)
    assert ended.result["stop"] == "cancelled"
    # A row for each piece of the prompt that was run beside it, at least: 1500 tokens in pieces of 128.
    assert len(ended.result["ids"]) >= 1500 // 128


def test_cancelling_frees_the_place_of_who_runs_and_of_who_waits(session: Session) -> None:
    endless = replace(OPTIONS, max_tokens=1 << 20, digest=False)
    with running(session, parallel=1) as scheduler:
        first, second, third = (Inbox(session, "In the", options) for options in (endless, endless, OPTIONS))
        for inbox in (first, second, third):
            scheduler.submit(inbox.job)
        first.first_text()
        load = scheduler.call(scheduler.load).result(60)
        assert (load.running, load.waiting) == (1, 2)
        scheduler.cancel(second.job)
        assert isinstance(second.end(), Failed)
        scheduler.cancel(first.job)
        cancelled = first.end()
        assert isinstance(cancelled, Done)
        assert cancelled.result["stop"] == "cancelled"
        assert isinstance(third.end(), Done)
        scheduler.cancel(third.job)  # has ended: nothing happens
        load = scheduler.call(scheduler.load).result(60)
        assert (load.running, load.waiting) == (0, 0)
    assert first.events.empty()


def test_leaving_the_block_ends_every_job(session: Session) -> None:
    endless = replace(OPTIONS, max_tokens=1 << 20, digest=False)
    with running(session, parallel=1) as scheduler:
        first, second = Inbox(session, "In the", endless), Inbox(session, "And the", endless)
        scheduler.submit(first.job)
        scheduler.submit(second.job)
        first.first_text()
    ended = first.end()
    assert isinstance(ended, Done)
    assert ended.result["stop"] == "cancelled"
    refused = second.end()
    assert isinstance(refused, Failed)
    assert isinstance(refused.error, Ending)
    assert not scheduler.is_alive
    with pytest.raises(Ending, match="is ending"):
        scheduler.submit(first.job)


def test_there_are_only_so_many_places(session: Session) -> None:
    with running(session, parallel=1, queue=2) as scheduler, ExitStack() as held:
        for _ in range(3):
            held.enter_context(scheduler.place())
        with pytest.raises(Busy, match="3 requests are under way or wait"), scheduler.place():
            pass
        held.pop_all().close()
        with scheduler.place():
            pass


def test_a_job_that_fails_takes_no_other_with_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of one sequence are made not finite, as a broken model's would be."""
    expected = alone(session, "In the beginning", OPTIONS)
    run = session.model.executor.run
    bad = 77

    def spoilt(rows: Any, *rest: Any) -> Any:
        if any(bad in sequence.tokens for sequence in rows.sequences) and not np.all(rows.tokens == bad):
            yield from run(rows, *rest)
            raise BackboneError("the logits are not finite")
        return (yield from run(rows, *rest))

    monkeypatch.setattr(session.model.executor, "run", spoilt)
    hold = threading.Event()
    with running(session) as scheduler:
        scheduler.call(lambda: hold.wait(60))
        good, ill = Inbox(session, "In the beginning"), Inbox(session, [bad, bad])
        scheduler.submit(ill.job)
        scheduler.submit(good.job)
        hold.set()
        failed, done = ill.end(), good.end()
        assert scheduler.is_alive
    assert isinstance(failed, Failed)
    assert "not finite" in str(failed.error)
    assert isinstance(done, Done)
    assert done.result["logits_sha256"] == expected.logits_sha256


@pytest.mark.parametrize(("ids", "kind"), [([1] * 3000, ContextFull), ([], BackboneError), ([10**6], BackboneError)])
def test_what_cannot_be_run_fails_alone(session: Session, ids: list[int], kind: type[Exception]) -> None:
    with running(session) as scheduler:
        inbox, after = Inbox(session, ids), Inbox(session, "In the")
        scheduler.submit(inbox.job)
        scheduler.submit(after.job)
        failed = inbox.end()
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, kind)
        assert isinstance(after.end(), Done)


def test_a_prompt_that_begins_like_an_earlier_one_runs_only_the_rest(session: Session) -> None:
    first = "And God said unto Noah, the end of all flesh"
    again = first + " is come before me; for the earth is filled"
    expected = alone(session, again, OPTIONS)
    with running(session, parallel=2) as scheduler:
        for prompt, least in ((first, 0), (again, 8), ("Of another kind", 0), ("And of one more", 0)):
            inbox = Inbox(session, prompt)
            scheduler.submit(inbox.job)
            done = inbox.end()
            assert isinstance(done, Done)
            assert done.cached >= least
            assert done.cached + done.result["timings"]["prompt"]["tokens"] == len(inbox.job.prompt_ids)
            if prompt == again:
                assert done.result["logits_sha256"] == expected.logits_sha256
            assert scheduler.call(scheduler.load).result(60).kept <= 2


def test_when_its_thread_fails_nobody_waits_forever(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Schedule.next_step

    def broken(self: Any) -> Any:
        if self.is_idle:  # the thread may look before the job is handed in
            return real(self)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Schedule, "next_step", broken)
    with running(session) as scheduler:
        inbox = Inbox(session, "In the")
        scheduler.submit(inbox.job)
        failed = inbox.end()
        assert isinstance(failed, Failed)
        assert "its log says how" in str(failed.error)
        until = time.monotonic() + 60
        while scheduler.is_alive:
            assert time.monotonic() < until
        with pytest.raises(Ending):
            scheduler.submit(inbox.job)
    assert "a bug" in caplog.text


def test_while_there_is_nothing_to_do_nothing_is_done(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, woken = Scheduler._idle, list[bool]()

    def watched(self: Scheduler) -> None:
        started = time.monotonic()
        idle(self)
        woken.append(bool(self._inbox) or time.monotonic() - started > IDLE_S / 2)

    monkeypatch.setattr(Scheduler, "_idle", watched)
    with running(session) as scheduler:
        for _ in range(100):
            scheduler.call(lambda: None).result(60)
            os.sched_yield()
    # What woke it may have been taken in before it slept: once for each call, at most.
    assert woken.count(False) <= 101
    assert len(woken) <= 300


def test_nothing_is_kept_beyond_a_change_of_the_class_map(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of an earlier class map would make an answer that no map gives."""
    monkeypatch.setattr(session.engine.experts, "class_changes", changes := list[MapChange]())
    whole = session.class_map()
    # A map for each change; in a server one may also be planned anew between two answers, which is no change of any.
    monkeypatch.setattr(Session, "class_map", lambda _: replace(whole, dense=f"{whole.dense} {len(changes)}"))
    prompt = "And God said unto Noah, the end of all flesh"
    with running(session) as scheduler:

        def cached(options: GenerateOptions = OPTIONS) -> int:
            scheduler.submit((inbox := Inbox(session, prompt, options)).job)
            done = inbox.end()
            assert isinstance(done, Done)
            assert done.result["class_changed_at"] is None
            return done.cached

        assert (cached(), cached() > 0) == (0, True)
        changes.append(MapChange("a" * 64, "b" * 64))  # while nobody was answered
        assert (cached(), cached() > 0) == (0, True)
        inbox = Inbox(session, prompt, replace(OPTIONS, max_tokens=1500, digest=False))
        scheduler.submit(inbox.job)
        inbox.first_text()
        scheduler.call(lambda: changes.append(MapChange("b" * 64, "c" * 64))).result(60)
        scheduler.cancel(inbox.job)
        done = inbox.end()
        assert isinstance(done, Done)
        (change,) = done.result["class_changed_at"]
        assert (change["from"], change["to"]) == ("b" * 64, "c" * 64)
        assert scheduler.call(scheduler.load).result(60).kept == 0
        assert cached() == 0


def test_nothing_is_kept_of_which_a_worker_that_was_found_wrong_had_a_part(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values may be wrong for good."""
    monkeypatch.setattr(type(session.engine.experts), "doubts", found := Found())
    prompt = "And God said unto Noah, the end of all flesh"
    with running(session) as scheduler:

        def ask(options: GenerateOptions = OPTIONS) -> Done:
            scheduler.submit((inbox := Inbox(session, prompt, options)).job)
            done = inbox.end()
            assert isinstance(done, Done)
            return done

        assert (ask().cached, ask().cached > 0) == (0, True)
        found.count += 1  # while nobody was answered
        done = ask()
        assert (done.cached, done.result["in_doubt"]) == (0, False)
        inbox = Inbox(session, prompt, replace(OPTIONS, max_tokens=1500, digest=False))
        scheduler.submit(inbox.job)
        inbox.first_text()
        scheduler.call(found.more).result(60)
        scheduler.cancel(inbox.job)
        last = inbox.end()
        assert isinstance(last, Done)
        assert last.result["in_doubt"]
        assert scheduler.call(scheduler.load).result(60).kept == 0
        assert change_lines(last.result)[0].startswith("a worker was found to be wrong")


class Found:
    """How often an audit found somebody wrong, in place of a swarm's own count."""

    count = 0

    def __get__(self, *_: object) -> int:
        return self.count

    def more(self) -> None:
        """Once more."""
        self.count += 1


def test_what_is_called_may_fail_and_the_thread_goes_on(session: Session) -> None:
    with running(session) as scheduler:
        with pytest.raises(ZeroDivisionError):
            scheduler.call(lambda: 1 // 0).result(60)
        assert scheduler.call(lambda: threading.current_thread().name).result(60) == "engine"
