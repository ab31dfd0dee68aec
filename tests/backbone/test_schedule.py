"""Whose tokens run next: nobody waits for a long prompt, nobody overtakes, and every token runs once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backbone.schedule import Schedule


def started(schedule: Schedule[str]) -> list[str]:
    """Begin what can; the prompt of each job is as long as its name."""
    begun = []
    while (job := schedule.next_waiting()) is not None:
        schedule.begin(job, len(job))
        begun.append(job)
    return begun


def step(schedule: Schedule[str]) -> list[list[tuple[str, int]]]:
    return [[(piece.job, piece.count) for piece in batch] for batch in schedule.next_step()]


def test_only_so_many_begin_and_the_others_follow_in_order() -> None:
    schedule = Schedule[str](2)
    for job in ("a", "bb", "ccc"):
        schedule.submit(job)
    assert started(schedule) == ["a", "bb"]
    assert (schedule.running, schedule.waiting) == (2, 1)
    schedule.remove("a")
    assert started(schedule) == ["ccc"]
    schedule.remove("bb")
    schedule.remove("ccc")
    assert schedule.is_idle


def test_a_lone_prompt_runs_in_two_batches_at_once() -> None:
    schedule = Schedule[str](1, chunk_rows=4, beside_rows=2)
    schedule.submit("x" * 11)
    started(schedule)
    assert step(schedule) == [[("x" * 11, 4)], [("x" * 11, 4)]]
    assert step(schedule) == [[("x" * 11, 3)]]
    schedule.answering("x" * 11)
    assert step(schedule) == [[("x" * 11, 1)]]


def test_answers_go_on_beside_a_long_prompt_and_a_short_one_is_not_behind_it() -> None:
    schedule = Schedule[str](3, chunk_rows=8, beside_rows=4)
    schedule.submit("a")
    started(schedule)
    step(schedule)
    schedule.answering("a")
    schedule.submit(long := "l" * 100)
    schedule.submit(short := "s" * 6)
    started(schedule)
    assert step(schedule) == [[("a", 1)], [(long, 4)]]
    assert step(schedule) == [[("a", 1)], [(short, 4)]]
    assert step(schedule) == [[("a", 1)], [(long, 4)]]
    assert step(schedule) == [[("a", 1)], [(short, 2), (long, 2)]]


def test_who_is_removed_gets_no_turn_wherever_it_was() -> None:
    schedule = Schedule[str](2)
    for job in ("a", "b", "c"):
        schedule.submit(job)
    started(schedule)
    step(schedule)
    schedule.answering("a")
    for job in ("a", "b", "c", "never there"):
        schedule.remove(job)
    assert schedule.is_idle
    assert step(schedule) == []


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_every_token_of_every_prompt_runs_once_and_all_end(
    lengths: list[int], most: int, chunk: int, beside: int
) -> None:
    schedule = Schedule[str](most, chunk_rows=chunk, beside_rows=beside)
    jobs = {f"{i:02}": length for i, length in enumerate(lengths)}
    left, ended = dict(jobs), list[str]()
    for job in jobs:
        schedule.submit(job)
    for _ in range(sum(lengths) + 3 * len(lengths)):
        while (job := schedule.next_waiting()) is not None:
            schedule.begin(job, jobs[job])
        answering = [job for job in jobs if not left[job] and job not in ended]
        batches = step(schedule)
        rows = {job: sum(count for batch in batches for j, count in batch if j == job) for job in jobs}
        assert all(rows[job] == 1 for job in answering), "an answer was held up"
        for batch in batches:
            assert sum(count for job, count in batch if left[job]) <= max(chunk, beside)
        for job in answering:
            schedule.remove(job)
            ended.append(job)
        for job, count in rows.items():
            if job not in answering and count:
                left[job] -= count
                assert left[job] >= 0
                if not left[job]:
                    schedule.answering(job)
        assert schedule.running <= most
    assert len(ended) == len(jobs)
    assert schedule.is_idle
