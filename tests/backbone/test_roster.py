"""Who is kept in mind: a backbone that lives for long is not to grow with everybody who ever came."""

from __future__ import annotations

import pytest

from backbone import roster
from backbone.roster import MOST_LOST, Peer, Roster, WorkerReport


def peer(number: int, *, lost_s: float | None = None, is_trusted: bool = True) -> Peer:
    made = Peer(b"key %d" % number, WorkerReport(f"w{number}", state="serving"))
    if lost_s is not None:
        made.fail("it is gone", lost_s, is_trusted=is_trusted)
    return made


def test_of_the_lost_the_last_are_kept() -> None:
    here, lost = Roster(), [peer(i, lost_s=float(i * 7 % 100)) for i in range(MOST_LOST + 5)]
    for each in (*lost, peer(100)):
        here.add(each)
    first = sorted(lost, key=lambda each: each.lost_s)[:5]
    assert here.long_lost() == first
    for each in first:
        here.forget(each)
    assert here.long_lost() == []
    assert here.earlier.workers == 5
    assert len(list(here)) == MOST_LOST + 1
    assert here.of_key(first[0].key) is None
    assert here.free_name(first[0].name) == first[0].name


def test_who_lied_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MOST_LOST", 0)
    here, liar, unfit, gone = Roster(), peer(1, lost_s=1.0), peer(2), peer(3, lost_s=2.0)
    liar.is_caught, unfit.report.state = True, "unfit"
    for each in (liar, unfit, gone, peer(4)):
        here.add(each)
    assert here.long_lost() == [gone]


def test_what_the_forgotten_cost_is_still_counted() -> None:
    here = Roster()
    for number in (1, 2):
        gone = peer(number, lost_s=0.0)
        tally = gone.report.tally
        tally.retried, tally.hedged_won, tally.hedged_lost, tally.waited_s = number, 10 * number, 100 * number, 0.5
        here.add(gone)
        here.forget(gone)
    sum_of = here.earlier.tally
    assert (sum_of.retried, sum_of.hedged_won, sum_of.hedged_lost, sum_of.waited_s) == (3, 30, 300, 1.0)


def test_who_comes_back_is_no_earlier_worker_and_who_was_revoked_neither() -> None:
    here = Roster()
    for number in range(3):
        gone = peer(number, lost_s=0.0)
        gone.report.tally.retried = 1
        here.add(gone)
        here.forget(gone, is_gone=number == 0)
    assert here.earlier.workers == 2
    for _ in range(3):
        back = peer(1, lost_s=1.0)
        here.add(back)
        assert here.earlier.workers == 1
        here.forget(back)
        assert here.earlier.workers == 2
    assert here.earlier.tally.retried == 3


@pytest.mark.parametrize("is_trusted", [True, False])
def test_who_is_barred_stays_so(is_trusted: bool) -> None:
    here, gone = Roster(), peer(1, lost_s=0.0, is_trusted=is_trusted)
    here.add(gone)
    here.forget(gone)
    back = peer(1)
    here.add(back)
    assert back.is_barred is not is_trusted


def test_who_is_lost_holds_nothing() -> None:
    gone = peer(1)
    gone.wanted, gone.assigned, gone.cannot = {0: frozenset({1})}, {0: roster.Assigned(1, frozenset({1}))}, {1: "full"}
    gone.fail("it is gone", 5.0, is_trusted=True)
    assert (gone.wanted, gone.assigned, gone.cannot, gone.report.state, gone.lost_s) == ({}, {}, {}, "lost", 5.0)
