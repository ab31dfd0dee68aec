"""The clock's arithmetic, on a time that stands still until it is told to go on."""

from __future__ import annotations

import pytest

from backbone import clock
from backbone.clock import PARTS, Clock


class Time:
    """Nanoseconds, set by hand."""

    now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "perf_counter_ns", time)
    return time


def test_a_lap_is_charged_once_and_a_mark_charges_nobody(time: Time) -> None:
    found = Clock()
    time.now = 10
    found.lap("dense")
    time.now = 15
    found.lap("router")
    time.now = 100
    found.mark()
    time.now = 103
    found.lap("dense")
    found.add("wire", 7)
    assert {part: ns for part, ns in found.ns.items() if ns} == {"dense": 13, "router": 5, "wire": 7}


def test_the_split_sums_to_the_time_of_a_token(time: Time) -> None:
    found = Clock()
    found.add("dense", 6_000_000)
    found.add("sampling", 2_000_000)
    split = found.split(4, 0.010)
    assert split == pytest.approx({**dict.fromkeys(PARTS, 0.0), "dense": 1500.0, "sampling": 500.0, "other": 500.0})
    assert sum(found.split(4, 0.001).values()) == pytest.approx(250)  # charged more than went by: it shows


def test_cleared_it_begins_anew(time: Time) -> None:
    found = Clock()
    found.add("experts", 5)
    time.now = 50
    found.clear()
    time.now = 51
    found.lap("combine")
    assert {part: ns for part, ns in found.ns.items() if ns} == {"combine": 1}


def test_a_part_that_is_none_is_refused() -> None:
    for charge in (lambda c: c.lap("lunch"), lambda c: c.add("lunch", 1)):
        with pytest.raises(KeyError):
            charge(Clock())


def test_a_part_of_a_lap_goes_elsewhere_but_never_more_than_went_by(time: Time) -> None:
    found = Clock()
    time.now += 10
    found.lap("wire", less=4)
    time.now += 3
    found.lap("wire", less=1 << 60)
    assert (found.ns["wire"], found.ns["experts"]) == (6, 7)
