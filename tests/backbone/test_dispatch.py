"""Dispatch without sockets: whatever happens in whatever order, each expert of a ticket is done exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backbone.calls import (
    APART,
    Action,
    Call,
    Cause,
    Checked,
    CheckFailed,
    Complete,
    ComputeLocally,
    Fill,
    Member,
    NewMap,
    ReportDropped,
    ReportLost,
    Send,
    Spare,
    Standing,
)
from backbone.choice import choose
from backbone.class_map import ClassMap
from backbone.dispatch import Dispatcher
from backbone.lateness import LATE_FACTOR, LATE_S, UNKNOWN_S
from backbone.pace import Pace

WIDTH, DEADLINE_S = 8, 10.0
OURS, THEIRS = "ours", "theirs"  # the backbone's class, and another
MAP = ClassMap.of_backbone(OURS, {0: 5, 1: 5})


def join(
    dispatcher: Dispatcher, name: str, kind: str, epoch: int, holds: Mapping[int, tuple[int, ...]], now_s: float
) -> list[Action]:
    """A worker says hello and has all its experts loaded, in a session of the same number as its epoch."""
    actions = dispatcher.joined(name, kind, epoch, now_s)
    for layer, experts in holds.items():
        dispatcher.loaded(name, layer, epoch, experts)
    return actions


def serving(
    *workers: tuple[str, str, Mapping[int, tuple[int, ...]]], theirs: tuple[tuple[int, int], ...] = ()
) -> Dispatcher:
    """Workers by name, class and what they hold; `theirs`: each (layer, expert) that the plan gives the other class."""
    dispatcher = Dispatcher(MAP, deadline_s=DEADLINE_S)
    dispatcher.planned(dict.fromkeys(theirs, THEIRS))
    for epoch, (name, kind, holds) in enumerate(workers, 1):
        assert join(dispatcher, name, kind, epoch, holds, 0.0) == []
    return dispatcher


def two_workers() -> Dispatcher:
    """`a` holds experts 0 and 1 of layer 0, `b` 2 and 3; nobody holds 4."""
    return serving(("a", OURS, {0: (0, 1)}), ("b", OURS, {0: (2, 3)}))


def issue(dispatcher: Dispatcher, load: dict[int, int], ticket: int = 1, now_s: float = 0.0) -> list[Action]:
    return dispatcher.issued(ticket, 0, load, WIDTH, now_s)


def sent(actions: list[Action]) -> list[Call]:
    return [action.call for action in actions if isinstance(action, Send)]


def answer(dispatcher: Dispatcher, call: Call, **changes: Any) -> list[Action]:
    told: dict[str, Any] = {
        "worker": call.worker,
        "seq": call.seq,
        "epoch": call.epoch,
        "shape": (call.pairs, call.width),
        "now_s": 0.0,
        "is_finite": True,
    }
    return dispatcher.answered(**(told | changes))


def test_one_call_for_each_worker_and_the_rest_here() -> None:
    actions = issue(two_workers(), {3: 1, 0: 2, 4: 1, 1: 1})
    assert actions == [
        Send(Call(1, 1, "b", 0, 2, (3,), 1, WIDTH, 10.0)),
        Send(Call(2, 1, "a", 0, 1, (0, 1), 3, WIDTH, 10.0)),
        ComputeLocally(1, 0, (4,)),
    ]


def test_a_ticket_is_complete_with_its_last_rows() -> None:
    dispatcher = two_workers()
    first, second = sent(issue(dispatcher, {0: 1, 2: 1, 4: 1}))
    assert answer(dispatcher, second) == [Fill(second)]
    assert dispatcher.computed(1, 4, 1.0) == []
    assert answer(dispatcher, first) == [Fill(first), Complete(1)]
    assert dispatcher.next_deadline() is None


def test_a_ticket_without_experts_is_complete_at_once() -> None:
    assert issue(two_workers(), {}) == [Complete(1)]


def test_a_lost_workers_calls_are_computed_here() -> None:
    dispatcher = two_workers()
    (first,) = sent(issue(dispatcher, {0: 1}))
    (second,) = sent(issue(dispatcher, {1: 1}, ticket=2))
    assert dispatcher.lost("a", "killed", 1.0) == [
        ReportLost("a", 1, "killed", True),
        ComputeLocally(1, 0, (0,)),
        ComputeLocally(2, 0, (1,)),
    ]
    assert dispatcher.lost("a", "killed again", 1.0) == []
    assert isinstance(answer(dispatcher, first)[0], ReportDropped)
    assert isinstance(answer(dispatcher, second)[0], ReportDropped)
    assert dispatcher.computed(1, 0, 1.0) == [Complete(1)]
    assert issue(dispatcher, {0: 1}, ticket=3) == [ComputeLocally(3, 0, (0,))]


def test_the_second_answer_and_a_strangers_are_dropped() -> None:
    dispatcher = two_workers()
    (call,) = sent(issue(dispatcher, {0: 1}))
    assert isinstance(answer(dispatcher, call, worker="b")[0], ReportDropped)
    assert answer(dispatcher, call) == [Fill(call), Complete(1)]
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)
    assert dispatcher.standing("a") is Standing.SERVING


def test_garbage_costs_a_worker_its_trust() -> None:
    for changes, told in (
        ({"epoch": 9}, "epoch 9, asked of epoch 1"),
        ({"seq": 99}, "rows of call 99, which was never made"),
        ({"shape": (2, WIDTH)}, "rows (2, 8), asked for (1, 8)"),
        ({"shape": (1, WIDTH + 1)}, "rows (1, 9), asked for (1, 8)"),
    ):
        dispatcher = two_workers()
        (call,) = sent(issue(dispatcher, {0: 1}))
        lost, local = answer(dispatcher, call, **changes)
        assert isinstance(lost, ReportLost)
        assert not lost.is_trusted
        assert told in lost.reason
        assert local == ComputeLocally(1, 0, (0,))


def test_a_refusal_is_believed() -> None:
    dispatcher = two_workers()
    (call,) = sent(issue(dispatcher, {0: 1}))
    assert isinstance(dispatcher.refused("b", call.seq, "not mine", 1.0)[0], ReportDropped)
    lost, local = dispatcher.refused("a", call.seq, "no memory", 1.0)
    assert lost == ReportLost("a", 1, "it refused call 1, layer 0: no memory", True)
    assert local == ComputeLocally(1, 0, (0,))


def test_a_deadline_loses_the_late_worker_only() -> None:
    dispatcher = two_workers()
    dispatcher._hedge_s = 1e9
    sent(issue(dispatcher, {0: 1}, now_s=5.0))
    sent(issue(dispatcher, {2: 1}, ticket=2, now_s=6.0))
    assert dispatcher.next_deadline() == 15.0
    assert dispatcher.ticked(14.9) == []
    assert dispatcher.ticked(15.0) == [ReportLost("a", 1, "no answer within 10 s", True), ComputeLocally(1, 0, (0,))]
    assert dispatcher.next_deadline() == 16.0


def test_a_call_of_whose_worker_nothing_is_known_is_hedged_soon() -> None:
    """One that was stopped or killed before its first answer must not hold an answer for a minute."""
    dispatcher = serving(("a", OURS, {0: (0,)}), ("b", OURS, {0: (0,)}))
    (call,) = sent(issue(dispatcher, {0: 1}, now_s=5.0))
    assert dispatcher.next_deadline() == 5.0 + UNKNOWN_S < call.deadline_s
    (hedge,) = sent(dispatcher.ticked(5.0 + UNKNOWN_S))
    assert {call.worker, hedge.worker} == {"a", "b"}
    alone = serving(("a", OURS, {0: (0,)}))
    issue(alone, {0: 1})
    assert alone.ticked(UNKNOWN_S) == [ComputeLocally(1, 0, (0,))]


def test_a_full_queue_costs_the_call_and_a_pause() -> None:
    dispatcher = two_workers()
    (first,) = sent(issue(dispatcher, {0: 1}))
    (second,) = sent(issue(dispatcher, {1: 1}, ticket=2))
    assert dispatcher.unsent(second.seq, 1.0) == [ComputeLocally(2, 0, (1,))]
    assert dispatcher.standing("a") is Standing.STALLED
    assert issue(dispatcher, {0: 1}, ticket=3) == [ComputeLocally(3, 0, (0,))]
    assert answer(dispatcher, first) == [Fill(first), Complete(1)]
    assert dispatcher.standing("a") is Standing.SERVING
    assert sent(issue(dispatcher, {0: 1}, ticket=4))


def test_a_worker_that_comes_back_starts_anew() -> None:
    dispatcher = two_workers()
    (call,) = sent(issue(dispatcher, {0: 1}))
    lost, local = join(dispatcher, "a", OURS, 7, {0: (0,)}, 1.0)
    assert isinstance(lost, ReportLost)
    assert local == ComputeLocally(1, 0, (0,))
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)
    (again,) = sent(issue(dispatcher, {0: 1}, ticket=2))
    assert (again.worker, again.epoch) == ("a", 7)


def test_a_layer_serves_as_soon_as_it_is_loaded_and_until_it_is_let_go() -> None:
    dispatcher = serving(("a", OURS, {0: (0, 1)}))
    assert dispatcher.joined("b", OURS, 5, 0.0) == []
    assert [c.worker for c in sent(issue(dispatcher, {0: 1, 1: 1}))] == ["a"]
    dispatcher.loaded("b", 0, 9, (1, 2))
    calls = {c.worker: c for c in sent(issue(dispatcher, {0: 1, 1: 1, 2: 1}, ticket=2))}
    assert (sorted(calls["b"].experts), calls["b"].epoch) == ([1, 2], 9)
    # Asked for fewer from now on; what is under way counts, of the old epoch or of the new.
    dispatcher.kept("b", 0, (2,))
    assert [c.worker for c in sent(issue(dispatcher, {1: 1}, ticket=3))] == ["a"]
    dispatcher.loaded("b", 0, 10, (2, 3))
    assert answer(dispatcher, calls["b"]) == [Fill(calls["b"])]
    (call,) = sent(issue(dispatcher, {3: 1}, ticket=4))
    assert (call.worker, call.epoch) == ("b", 10)
    assert answer(dispatcher, call, epoch=9)[0] == ReportLost(
        "b", 5, f"call {call.seq}: rows of epoch 9, asked of epoch 10", is_trusted=False
    )
    dispatcher.loaded("b", 0, 11, (0,))  # a lost one's word counts for nothing
    assert sent(issue(dispatcher, {2: 1}, ticket=5)) == []


def test_a_forgotten_ticket_leaves_nothing_behind() -> None:
    dispatcher = two_workers()
    (call,) = sent(issue(dispatcher, {0: 1, 4: 1}))
    assert dispatcher.forgotten(1) == []
    assert dispatcher.next_deadline() is None
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)
    assert dispatcher.computed(1, 4, 1.0) == []
    assert dispatcher.standing("a") is Standing.SERVING


def test_the_least_loaded_holder_is_chosen() -> None:
    a, b = Member("a", OURS, 1), Member("b", OURS, 1)
    even = {"a": 1.0, "b": 1.0}
    assert choose([a, b], 1, {}, even) is a
    assert choose([a, b], 1, {"a": 1.0}, even) is b
    assert choose([a, b], 3, {"a": 1.0}, even | {"b": 2.0}) is a
    dispatcher = serving(("a", OURS, {0: (0, 1, 2)}), ("b", OURS, {0: (0, 1)}))
    calls = sent(issue(dispatcher, {2: 3, 0: 1, 1: 1}))
    assert {c.worker: c.experts for c in calls} == {"a": (2,), "b": (0, 1)}


A, B, C = {0: (0, 1)}, {0: (0, 1)}, {0: (1,)}
IF_THEIRS: dict[str, tuple[tuple[int, int], ...]] = {OURS: (), THEIRS: ((0, 0), (0, 1))}


def undone(how: str, dispatcher: Dispatcher, call: Call) -> list[Action]:
    """What happens to a call that its worker does not do."""
    if how == "garbage":
        return answer(dispatcher, call, epoch=99, now_s=7.0)
    if how == "refused":
        return dispatcher.refused(call.worker, call.seq, "no memory", 7.0)
    if how == "stalled":
        return dispatcher.unsent(call.seq, 7.0)
    return dispatcher.ticked(call.deadline_s) if how == "late" else dispatcher.lost(call.worker, "killed", 7.0)


UNDONE = ["killed", "late", "garbage", "refused", "stalled"]


@pytest.mark.parametrize("how", UNDONE)
@pytest.mark.parametrize("kind", [OURS, THEIRS])
def test_what_a_worker_does_not_do_is_asked_of_another_holder(how: str, kind: str) -> None:
    dispatcher = serving(("a", kind, A), theirs=IF_THEIRS[kind])
    (first,) = sent(issue(dispatcher, {0: 2, 1: 3}))
    join(dispatcher, "b", kind, 2, B, 0.0)
    join(dispatcher, "c", kind, 3, C, 0.0)
    actions = undone(how, dispatcher, first)
    when = first.deadline_s if how == "late" else 7.0
    again = [a for a in actions if isinstance(a, Send)]
    assert again == [
        Send(Call(2, 1, "b", 0, 2, (0,), 2, WIDTH, when + DEADLINE_S)),
        Send(Call(3, 1, "c", 0, 3, (1,), 3, WIDTH, when + DEADLINE_S)),
    ]
    assert not [a for a in actions if isinstance(a, ComputeLocally | NewMap)]
    # The answer to the old call is of no use any more; those to the new ones complete the ticket.
    late = answer(dispatcher, first)
    assert [type(a) for a in late] == [ReportDropped]
    second, third = sent(actions)
    assert answer(dispatcher, second) == [Fill(second)]
    assert answer(dispatcher, third) == [Fill(third), Complete(1)]


def test_no_call_is_asked_of_a_worker_that_is_late_itself() -> None:
    dispatcher = serving(("a", OURS, A), ("b", OURS, B), ("c", OURS, C))
    calls = sent(issue(dispatcher, {0: 1, 1: 1}))
    assert {call.worker for call in calls} == {"a", "b"}
    lost_a, lost_b, local, again = dispatcher.ticked(DEADLINE_S)
    assert [type(a) for a in (lost_a, lost_b)] == [ReportLost, ReportLost]
    assert local == ComputeLocally(1, 0, (0,))
    assert isinstance(again, Send)
    assert (again.call.worker, again.call.experts) == ("c", (1,))


def test_a_call_goes_on_from_worker_to_worker_until_nobody_is_left() -> None:
    dispatcher = serving(("a", OURS, A), ("b", OURS, B), ("c", OURS, C))
    (call,) = sent(issue(dispatcher, {1: 4}))
    for worker in "bc":
        (call,) = sent(dispatcher.unsent(call.seq, 1.0))
        assert call.worker == worker
    assert dispatcher.unsent(call.seq, 1.0) == [ComputeLocally(1, 0, (1,))]
    assert dispatcher.computed(1, 1, 1.0) == [Complete(1)]


def test_only_members_of_an_experts_class_are_asked() -> None:
    dispatcher = serving(("a", OURS, {0: (0, 1)}), ("b", THEIRS, {0: (0, 1)}), theirs=((0, 1),))
    assert {c.worker: c.experts for c in sent(issue(dispatcher, {0: 1, 1: 1}))} == {"a": (0,), "b": (1,)}


def test_the_loss_of_the_backbones_class_changes_no_map() -> None:
    dispatcher = two_workers()
    issue(dispatcher, {0: 1, 2: 1})
    actions = [*dispatcher.lost("a", "killed", 1.0), *dispatcher.lost("b", "killed", 1.0)]
    assert not [a for a in actions if isinstance(a, NewMap)]
    assert dispatcher.class_map == MAP


def test_a_lost_workers_experts_are_the_backbones_for_good() -> None:
    theirs = tuple((layer, e) for layer in (0, 1) for e in (0, 1, 2))
    a, b = {0: (0, 1), 1: (0, 1)}, {0: (1, 2), 1: (2,)}
    dispatcher = serving(("a", THEIRS, a), ("b", THEIRS, b), theirs=theirs)
    planned = dispatcher.class_map
    (call,) = sent(issue(dispatcher, {0: 1}))
    lost, new, local = dispatcher.lost("a", "killed", 1.0)
    assert isinstance(lost, ReportLost)
    assert isinstance(new, NewMap)
    # Expert 1 of layer 0 is held by `b` too; the others are nobody's, asked for or not.
    assert new.experts == ((0, 0), (1, 0), (1, 1))
    assert (new.before, new.after) == (planned, dispatcher.class_map)
    assert new.before.digest != new.after.digest
    assert new.after.experts == {0: (OURS, THEIRS, THEIRS, OURS, OURS), 1: (OURS, OURS, THEIRS, OURS, OURS)}
    assert local == ComputeLocally(1, 0, (0,))
    # It comes back with all that it held, and may do only what is still of its class.
    assert join(dispatcher, "a", THEIRS, 8, a, 2.0) == []
    assert issue(dispatcher, {0: 1}, ticket=2) == [ComputeLocally(2, 0, (0,))]
    assert [c.worker for c in sent(issue(dispatcher, {1: 1}, ticket=3))] == ["a"]
    assert [c.worker for c in sent(dispatcher.lost("a", "killed", 3.0))] == ["b"]
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)


def test_of_a_stalled_worker_only_what_is_asked_for_changes() -> None:
    dispatcher = serving(("a", THEIRS, {0: (0, 1, 2)}), theirs=((0, 0), (0, 1), (0, 2)))
    (first,) = sent(issue(dispatcher, {0: 1}))
    (second,) = sent(issue(dispatcher, {1: 1}, ticket=2))
    new, local = dispatcher.unsent(second.seq, 1.0)
    assert isinstance(new, NewMap)
    assert (new.experts, local) == (((0, 1),), ComputeLocally(2, 0, (1,)))
    assert answer(dispatcher, first) == [Fill(first), Complete(1)]
    assert dispatcher.standing("a") is Standing.SERVING
    call, local = issue(dispatcher, {1: 1, 0: 1, 2: 1}, ticket=3)
    assert isinstance(call, Send)
    assert call.call.experts == (0, 2)
    assert local == ComputeLocally(3, 0, (1,))


def test_a_new_call_goes_to_the_holder_that_has_least_of_the_ticket() -> None:
    dispatcher = serving(("a", OURS, {0: (0,)}), ("b", OURS, {0: (0, 1)}), ("c", OURS, {0: (0,)}))
    calls = sent(issue(dispatcher, {1: 3, 0: 1}))
    assert [(c.worker, c.experts) for c in calls] == [("b", (1,)), ("a", (0,))]
    assert [(c.worker, c.experts) for c in sent(dispatcher.lost("a", "killed", 1.0))] == [("c", (0,))]


def test_what_is_held_by_a_worker_of_another_class_waits_for_its_map() -> None:
    """A worker may hold what is not of its class yet: it is asked for it once it is, and its loss means nothing before."""
    a, b = {0: (0, 1)}, {0: (1, 2)}
    dispatcher = serving(("a", OURS, a), ("b", THEIRS, b), theirs=((0, 1), (0, 2)))
    (call,) = sent(issue(dispatcher, {2: 1}))
    new, _ = dispatcher.unsent(call.seq, 1.0)
    assert isinstance(new, NewMap)
    assert new.experts == ((0, 2),)
    assert [type(action) for action in dispatcher.lost("a", "killed", 2.0)] == [ReportLost]
    assert join(dispatcher, "a", OURS, 7, a, 3.0) == []
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)  # the stalled one serves again
    (call,) = sent(issue(dispatcher, {1: 1}, ticket=2))
    _, new, again = dispatcher.lost("b", "killed", 4.0)
    assert isinstance(new, NewMap)
    assert (call.worker, new.experts) == ("b", ((0, 1),))
    assert [(c.worker, c.experts) for c in sent([again])] == [("a", (1,))]


# ---- rows that are not finite


def test_of_two_who_differ_the_one_whose_rows_are_not_finite_is_barred() -> None:
    dispatcher = serving(("a", OURS, A), ("b", OURS, B), ("c", OURS, C))
    (call, other) = sent(issue(dispatcher, {0: 1, 1: 1}))
    assert (call.worker, other.worker) == ("a", "b")
    (again,) = sent(answer(dispatcher, call, is_finite=False))
    assert (again.worker, dispatcher.standing("a")) == ("b", Standing.SUSPECT)
    assert [c.worker for c in sent(issue(dispatcher, {0: 1}, ticket=2))] == ["b"]
    fill, lost = answer(dispatcher, again)
    assert fill == Fill(again)
    assert lost == ReportLost("a", 1, "call 1, layer 0: rows that are not finite", is_trusted=False)
    assert answer(dispatcher, other) == [Fill(other), Complete(1)]
    assert dispatcher.tally("a").retried == 1


@pytest.mark.parametrize("kind", [OURS, THEIRS])
@pytest.mark.parametrize("is_finite", [True, False])
def test_before_a_second_holder_is_barred_the_backbone_judges(kind: str, is_finite: bool) -> None:
    holds = {0: (0, 1)}
    dispatcher = serving(("a", kind, holds), ("b", kind, holds), theirs=IF_THEIRS[kind])
    (call,) = sent(issue(dispatcher, {0: 1}))
    (call,) = sent(answer(dispatcher, call, is_finite=False))
    assert answer(dispatcher, call, is_finite=False) == [ComputeLocally(1, 0, (0,))]
    assert dispatcher.class_map == serving(theirs=IF_THEIRS[kind]).class_map
    actions = dispatcher.computed(1, 0, 1.0, is_finite=is_finite)
    if is_finite:
        lost = [action for action in actions if isinstance(action, ReportLost)]
        assert [(each.worker, each.is_trusted) for each in lost] == [("a", False), ("b", False)]
        assert [type(action) for action in actions if isinstance(action, NewMap)] == [NewMap] * (kind == THEIRS)
        assert actions[-1] == Complete(1)
    else:  # it was the input's fault, or the weights'
        assert actions == [Complete(1)]
        assert dispatcher.standing("a") is dispatcher.standing("b") is Standing.SERVING
        assert sent(issue(dispatcher, {0: 1}, ticket=2))


def test_a_third_holder_does_what_two_failed_at_and_the_backbone_cannot_do_in_their_class() -> None:
    holds = {0: (0,)}
    dispatcher = serving(*((w, THEIRS, holds) for w in "abc"), theirs=((0, 0),))
    (call,) = sent(issue(dispatcher, {0: 1}))
    for _ in range(2):
        actions = answer(dispatcher, call, is_finite=False)
        (call,) = sent(actions) or (call,)
    assert actions == [ComputeLocally(1, 0, (0,))]
    *lost, again = dispatcher.computed(1, 0, 1.0)
    assert [type(action) for action in lost] == [ReportLost] * 2
    (call,) = sent([again])
    assert call.worker == "c"
    assert answer(dispatcher, call) == [Fill(call), Complete(1)]


def test_a_forgotten_tickets_suspect_serves_again() -> None:
    dispatcher = serving(("a", OURS, A), ("b", OURS, B))
    (call,) = sent(issue(dispatcher, {0: 1}))
    answer(dispatcher, call, is_finite=False)
    dispatcher.forgotten(1)
    assert dispatcher.standing("a") is Standing.SERVING


# ---- deadlines and hedges


def measured(dispatcher: Dispatcher, load: dict[int, int], seconds: float, times: int = 8) -> float:
    """Answers of calls for these experts, each after so long; when it was then."""
    now_s = 0.0
    for ticket in range(1000, 1000 + times):
        calls = sent(issue(dispatcher, load, ticket, now_s))
        now_s += seconds
        for call in calls:
            assert answer(dispatcher, call, now_s=now_s)[0] == Fill(call)
    return now_s


def test_a_deadline_is_that_of_what_was_measured() -> None:
    dispatcher = serving(("a", OURS, {0: (0, 1)}), ("b", OURS, {0: (2,)}))
    now_s = measured(dispatcher, {0: 1}, 0.1)
    (quick, unknown) = sent(issue(dispatcher, {0: 1, 2: 1}, now_s=now_s))
    assert quick.deadline_s == now_s + DEADLINE_S  # what is set is less than any that is measured
    dispatcher = Dispatcher(MAP, deadline_s=1000.0)
    join(dispatcher, "a", OURS, 1, {0: (0, 1)}, 0.0)
    join(dispatcher, "b", OURS, 2, {0: (2,)}, 0.0)
    (first,) = sent(issue(dispatcher, {0: 1}))
    assert first.deadline_s == 1000.0
    answer(dispatcher, first, now_s=0.1)
    now_s = measured(dispatcher, {0: 1}, 0.1, 20)
    quick, unknown = sent(issue(dispatcher, {0: 1, 2: 1}, now_s=now_s))
    assert quick.deadline_s == now_s + LATE_S
    assert unknown.deadline_s == now_s + 1000.0
    assert now_s < (dispatcher.next_deadline() or 0.0) < quick.deadline_s  # it is hedged first
    dispatcher.ticked(now_s + 9.0)
    assert dispatcher.next_deadline() == quick.deadline_s
    (lost, *_) = dispatcher.ticked(quick.deadline_s)
    assert lost == ReportLost("a", 1, "no answer within 10 s", True)
    assert dispatcher.next_deadline() == unknown.deadline_s


def test_a_slow_workers_deadline_is_longer_and_calls_that_wait_for_others_have_more_time() -> None:
    dispatcher = Dispatcher(MAP, deadline_s=1000.0)
    join(dispatcher, "a", OURS, 1, {0: (0,)}, 0.0)
    now_s = measured(dispatcher, {0: 1}, 4.0, 30)
    first, second = (sent(issue(dispatcher, {0: 1}, ticket, now_s))[0] for ticket in (1, 2))
    assert LATE_FACTOR * 4.0 < first.deadline_s - now_s < 3 * LATE_FACTOR * 4.0
    assert second.deadline_s > first.deadline_s + 3.9


def late(*workers: tuple[str, str, Mapping[int, tuple[int, ...]]], theirs: bool = False) -> tuple[Dispatcher, Call]:
    """A call of expert 0 of worker `a`, long after all its earlier ones were answered."""
    dispatcher = serving(("a", THEIRS if theirs else OURS, A), theirs=((0, 0), (0, 1)) if theirs else ())
    now_s = measured(dispatcher, {0: 1}, 0.01)
    (call,) = sent(issue(dispatcher, {0: 1}, now_s=now_s))
    for epoch, worker in enumerate(workers, 2):
        join(dispatcher, *worker[:2], epoch, worker[2], now_s)
    assert dispatcher.ticked(now_s + 0.02) == []
    return dispatcher, call


LATER_S = 1.0


def test_a_call_that_takes_long_is_also_asked_of_another_holder_once() -> None:
    dispatcher, call = late(("b", OURS, B))
    (hedge,) = sent(dispatcher.ticked(LATER_S))
    assert (hedge.worker, hedge.experts) == ("b", (0,))
    assert dispatcher.ticked(LATER_S + 1.0) == []
    assert answer(dispatcher, hedge, now_s=LATER_S + 1.1) == [Fill(hedge), Complete(1)]
    assert dispatcher.standing("a") is Standing.SERVING
    # It is chosen last while it owes an answer, and for a second more; its answer is no garbage, and of no use.
    for now_s, chosen in ((2.2, "b"), (2.3, "b"), (4.0, "a")):
        calls = sent(issue(dispatcher, {0: 1}, 7, now_s))
        assert [c.worker for c in calls] == [chosen]
        dispatcher.forgotten(7)
        if now_s == 2.2:
            assert answer(dispatcher, call, now_s=2.25) == []
    tally = dispatcher.tally("a")
    assert (tally.hedged_won, tally.hedged_lost, tally.retried) == (0, 1, 0)
    assert tally.waited_s == pytest.approx(LATER_S + 1.1 - 0.08)
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)


def test_the_straggler_may_be_first_still() -> None:
    dispatcher, call = late(("b", OURS, B))
    (hedge,) = sent(dispatcher.ticked(LATER_S))
    assert answer(dispatcher, call, now_s=LATER_S) == [Fill(call), Complete(1)]
    assert answer(dispatcher, hedge, now_s=LATER_S) == []
    assert (dispatcher.tally("a").hedged_won, dispatcher.tally("b").hedged_lost) == (1, 0)


def test_without_another_holder_the_backbone_hedges_what_is_of_its_class() -> None:
    dispatcher, call = late()
    assert dispatcher.ticked(LATER_S) == [ComputeLocally(1, 0, (0,))]
    assert answer(dispatcher, call, now_s=LATER_S) == [Fill(call), Spare(1, (0,)), Complete(1)]
    assert dispatcher.computed(1, 0, LATER_S) == []
    assert dispatcher.computed_here == {Cause.HEDGED: 1}

    dispatcher, call = late()
    dispatcher.ticked(LATER_S)
    assert dispatcher.computed(1, 0, LATER_S) == [Complete(1)]
    # While the straggler owes an answer nobody waits for it again.
    assert issue(dispatcher, {0: 1, 1: 1}, 2, LATER_S) == [ComputeLocally(2, 0, (0, 1))]
    assert dispatcher.computed_here == {Cause.HEDGED: 1, Cause.STRAGGLING: 1}
    assert answer(dispatcher, call, now_s=LATER_S) == []
    assert sent(issue(dispatcher, {0: 1}, 3, LATER_S))


def test_no_hedge_leaves_the_class() -> None:
    dispatcher, _ = late(theirs=True)
    before = dispatcher.class_map
    assert dispatcher.ticked(LATER_S) == []
    dispatcher, _ = late(("b", OURS, B), theirs=True)
    assert dispatcher.ticked(LATER_S) == []
    dispatcher, _ = late(("b", THEIRS, B), theirs=True)
    assert [c.worker for c in sent(dispatcher.ticked(LATER_S))] == ["b"]
    assert dispatcher.class_map == before


def test_no_hedge_leaves_the_class_that_a_call_was_asked_under() -> None:
    dispatcher, _ = late(("b", OURS, B), theirs=True)
    (second,) = sent(issue(dispatcher, {0: 1}, 2, LATER_S))
    assert isinstance(dispatcher.unsent(second.seq, LATER_S)[0], NewMap)  # expert 0 is ours from now on, and `b` has it
    assert [c.worker for c in sent(issue(dispatcher, {0: 1}, 3, LATER_S))] == ["b"]
    assert dispatcher.ticked(LATER_S) == []


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_a_call_and_its_hedge_one_may_fail(first: str) -> None:
    dispatcher, call = late(("b", OURS, B))
    (hedge,) = sent(dispatcher.ticked(LATER_S))
    left, second = (hedge, "b") if first == "a" else (call, "a")
    assert [type(a) for a in dispatcher.lost(first, "killed", LATER_S)] == [ReportLost]
    assert [type(a) for a in dispatcher.lost(second, "killed", LATER_S)] == [ReportLost, ComputeLocally]
    assert isinstance(answer(dispatcher, left)[0], ReportDropped)
    assert dispatcher.computed(1, 0, LATER_S) == [Complete(1)]


def test_a_hedge_may_do_a_part() -> None:
    """Two experts of a call, of which another worker holds one and the backbone does the other."""
    dispatcher = serving(("a", OURS, A))
    now_s = measured(dispatcher, {0: 1, 1: 1}, 0.01)
    (call,) = sent(issue(dispatcher, {0: 1, 1: 1}, now_s=now_s))
    join(dispatcher, "c", OURS, 3, C, now_s)
    send, local = dispatcher.ticked(LATER_S)
    assert local == ComputeLocally(1, 0, (0,))
    (hedge,) = sent([send])
    assert (hedge.worker, hedge.experts) == ("c", (1,))
    assert answer(dispatcher, hedge, now_s=LATER_S) == [Fill(hedge)]
    assert answer(dispatcher, call, now_s=LATER_S) == [Fill(call, (0,)), Spare(1, (0,)), Complete(1)]


def test_a_straggler_that_never_answers_is_lost_at_its_deadline() -> None:
    dispatcher, call = late(("b", OURS, B))
    (hedge,) = sent(dispatcher.ticked(LATER_S))
    answer(dispatcher, hedge, now_s=LATER_S)
    assert dispatcher.next_deadline() == call.deadline_s
    assert dispatcher.ticked(call.deadline_s) == [ReportLost("a", 1, "no answer within 10 s", True)]
    assert dispatcher.next_deadline() is None


def test_the_faster_of_two_holders_gets_more() -> None:
    holds = {0: (0, 1, 2, 3)}
    dispatcher = serving(("a", OURS, holds), ("b", OURS, holds))
    now_s = 0.0
    for ticket in range(1, 20):
        calls = sent(issue(dispatcher, dict.fromkeys(range(4), 1), ticket, now_s))
        for call in sorted(calls, key=lambda call: call.worker):
            taken_s = call.pairs * (0.001 if call.worker == "a" else 0.0035)
            answer(dispatcher, call, now_s=now_s + taken_s, compute_s=taken_s)
        now_s += 1.0
    assert {c.worker: c.pairs for c in calls} == {"a": 3, "b": 1}


def test_who_was_slow_once_is_not_left_out() -> None:
    holds = {0: (0, 1, 2, 3)}
    dispatcher = serving(("a", OURS, holds), ("b", OURS, holds))
    for ticket in range(1, 20):
        calls = sent(issue(dispatcher, dict.fromkeys(range(4), 1), ticket, float(ticket)))
        for call in sorted(calls, key=lambda call: call.worker):
            taken_s = 0.05 if (call.worker, ticket) == ("b", 2) else 0.001
            answer(dispatcher, call, now_s=ticket + taken_s, compute_s=taken_s)
    assert {c.worker: c.pairs for c in calls} == {"a": 2, "b": 2}


def test_who_was_slow_at_first_is_asked_again_once_others_have_worked_for_long() -> None:
    holds = {0: (0, 1, 2, 3)}
    dispatcher = serving(("a", OURS, holds), ("b", OURS, holds))
    shares = []
    for ticket in range(1, 6000):
        calls = sent(issue(dispatcher, dict.fromkeys(range(4), 1), ticket, float(ticket)))
        for call in sorted(calls, key=lambda call: call.worker):
            taken_s = 0.4 if (call.worker == "b" and ticket < 8) else 0.05
            answer(dispatcher, call, now_s=ticket + taken_s, compute_s=taken_s)
        shares.append({c.worker: c.pairs for c in calls})
    assert shares[8] == {"a": 4}
    assert shares[-1] == {"a": 2, "b": 2}


def test_nobody_is_compared_with_one_that_was_lost() -> None:
    holds = {0: (0, 1, 2, 3)}
    dispatcher = serving(("a", OURS, holds), ("b", OURS, holds), ("c", OURS, holds))
    for name, row_s in (("a", 0.001), ("b", 0.008), ("c", 0.012)):  # b and c are about as fast, both far behind a
        dispatcher._members[name].pace.s_per_row = row_s
    dispatcher.lost("a", "it died", 1.0)
    calls = sent(issue(dispatcher, dict.fromkeys(range(4), 3), 1, 1.0))
    assert {c.worker: c.pairs for c in calls} == {"b": 6, "c": 6}


def test_workers_that_are_about_as_fast_share_evenly_whatever_their_wires() -> None:
    holds = {0: (0, 1, 2, 3)}
    dispatcher = serving(("a", OURS, holds), ("b", OURS, holds))
    now_s = 0.0
    for ticket in range(1, 20):
        calls = sent(issue(dispatcher, dict.fromkeys(range(4), 1), ticket, now_s))
        for call in sorted(calls, key=lambda call: call.worker):
            # A call costs a millisecond, and `b` computes a little more slowly.
            compute_s = call.pairs * (0.0001 if call.worker == "a" else 0.00015)
            answer(dispatcher, call, now_s=now_s + 0.001 + compute_s, compute_s=compute_s)
        now_s += 1.0
        assert {c.worker: c.pairs for c in calls} == {"a": 2, "b": 2}


MOST_S = 40.0


def brisk() -> Pace:
    """Of a worker that has answered calls of all sizes, each after half a second."""
    pace = Pace()
    for experts in range(1, 6):
        for rows in range(experts, 3 * experts + 1):
            for _ in range(6):
                pace.answered(experts, rows, 0.5, 0.5, 0.5)
    return pace


# ---- calls apart, proof and demotion


def apart(dispatcher: Dispatcher, worker: str = "a", load: Mapping[int, int] = {0: 2}, now_s: float = 0.0) -> Call:
    ((call,),) = [sent(dispatcher.asked_apart(worker, 0, load, WIDTH, now_s))]
    return call


def test_who_is_not_proven_serves_nothing_and_can_be_asked_apart() -> None:
    dispatcher = serving(("a", OURS, {}), ("b", OURS, {0: (0,)}))
    dispatcher.loaded("a", 0, 9, (0, 1), is_proven=False)
    assert issue(dispatcher, {0: 1})[0] == Send(Call(1, 1, "b", 0, 2, (0,), 1, WIDTH, 10.0))
    assert issue(dispatcher, {1: 1}, ticket=2) == [ComputeLocally(2, 0, (1,))]
    assert dispatcher.others("b", 0, 0) == []
    call = apart(dispatcher, load={1: 2, 0: 1})
    assert call == Call(2, APART, "a", 0, 9, (1, 0), 3, WIDTH, 10.0)
    assert answer(dispatcher, call) == [Checked(call)]
    dispatcher.kept("a", 0, (1,))  # what it lets go of does not prove the rest
    assert issue(dispatcher, {1: 1}, ticket=3) == [ComputeLocally(3, 0, (1,))]
    dispatcher.proven("a", 0)
    assert [c.worker for c in sent(issue(dispatcher, {1: 1}, ticket=4))] == ["a"]


def test_nobody_is_asked_apart_for_what_he_does_not_hold_or_when_he_is_lost() -> None:
    dispatcher = two_workers()
    assert dispatcher.asked_apart("a", 0, {2: 1}, WIDTH, 0.0) == []
    assert dispatcher.asked_apart("a", 1, {0: 1}, WIDTH, 0.0) == []
    assert dispatcher.asked_apart("nobody", 0, {0: 1}, WIDTH, 0.0) == []
    dispatcher.lost("a", "killed", 1.0)
    assert dispatcher.asked_apart("a", 0, {0: 1}, WIDTH, 0.0) == []


def test_rows_asked_apart_that_are_not_finite_are_for_whoever_asked_to_judge() -> None:
    dispatcher = two_workers()
    call = apart(dispatcher)
    assert answer(dispatcher, call, is_finite=False) == [Checked(call)]
    assert dispatcher.standing("a") is Standing.SERVING
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)  # twice


def test_garbage_for_a_call_apart_is_garbage() -> None:
    for changes in ({"epoch": 99}, {"shape": (1, WIDTH)}):
        dispatcher = two_workers()
        call = apart(dispatcher)
        lost, failed = answer(dispatcher, call, **changes)
        assert isinstance(lost, ReportLost)
        assert not lost.is_trusted
        assert failed == CheckFailed(call)
    dispatcher = two_workers()
    call = apart(dispatcher)
    assert isinstance(answer(dispatcher, call, worker="b")[0], ReportDropped)
    assert answer(dispatcher, call) == [Checked(call)]


@pytest.mark.parametrize("how", ["killed", "late", "refused", "stalled"])
def test_a_call_apart_that_is_not_done_is_told_and_nobody_else_is_asked(how: str) -> None:
    dispatcher = serving(("a", OURS, {0: (0,)}), ("b", OURS, {0: (0,)}))
    call = apart(dispatcher, load={0: 1})
    assert dispatcher.next_deadline() == call.deadline_s  # it is not hedged before
    assert dispatcher.ticked(call.deadline_s - 0.1) == []
    actions = undone(how, dispatcher, call)
    assert [a for a in actions if not isinstance(a, ReportLost)] == [CheckFailed(call)]
    assert isinstance(actions[0], ReportLost) == (how != "stalled")
    assert dispatcher.computed_here.total() == dispatcher.tally("a").retried == 0
    assert dispatcher.next_deadline() is None


def test_a_call_apart_counts_in_the_pace_and_is_no_straggler() -> None:
    dispatcher = two_workers()
    for second in range(6):
        answer(dispatcher, apart(dispatcher, now_s=float(second)), now_s=second + 0.5, compute_s=0.4)
    assert dispatcher._members["a"].pace.s_per_row == pytest.approx(0.2)
    assert dispatcher._members["a"].strays == 0
    dispatcher.forgotten(APART)  # of what is asked apart nobody lets go
    call = apart(dispatcher, now_s=9.0)
    dispatcher.forgotten(1)
    assert answer(dispatcher, call, now_s=9.1) == [Checked(call)]


def test_who_is_of_another_class_serves_no_member_of_the_one_he_said() -> None:
    dispatcher = serving(("a", OURS, {0: (0, 1)}), ("b", OURS, {0: (0,)}))
    calls = sent(issue(dispatcher, {0: 1, 1: 1}))
    mine = [call for call in calls if call.worker == "a"]
    actions = dispatcher.reclassed("a", "liars", 1.0)
    assert {e for call in mine for e in call.experts} == {
        e for action in actions for e in (action.call if isinstance(action, Send) else action).experts
    }
    assert ComputeLocally(1, 0, (1,)) in actions
    assert dispatcher.computed_here == {Cause.DEMOTED: 1}
    assert [c.worker for c in sent(issue(dispatcher, {0: 1}, ticket=2))] == ["b"]
    assert dispatcher.others("b", 0, 0) == []
    assert isinstance(answer(dispatcher, mine[0])[0], ReportDropped)
    assert dispatcher.standing("a") is Standing.SERVING
    dispatcher.planned({(0, 1): "liars"})  # a new map may give it what is of its own class
    assert [c.worker for c in sent(issue(dispatcher, {1: 1}, ticket=3))] == ["a"]


def test_the_last_of_another_class_that_is_demoted_changes_the_map() -> None:
    dispatcher = serving(("a", THEIRS, {0: (0, 1)}), ("b", THEIRS, {0: (0,)}), theirs=((0, 0), (0, 1)))
    before = dispatcher.class_map
    (change,) = dispatcher.reclassed("a", "liars", 1.0)
    assert change == NewMap(((0, 1),), before, dispatcher.class_map)
    assert dispatcher.class_map.of(0, 0) == THEIRS
    assert dispatcher.class_map.of(0, 1) == OURS
    assert dispatcher.reclassed("a", "liars", 1.0) == []


def test_who_is_demoted_answers_what_was_asked_apart() -> None:
    dispatcher = two_workers()
    call = apart(dispatcher)
    assert dispatcher.reclassed("a", "liars", 1.0) == []
    assert answer(dispatcher, call) == [Checked(call)]


class AnyOrder(RuleBasedStateMachine):
    """Workers of two classes that answer, lie, stall, die and return in any order, while tickets come and go."""

    @initialize(copies=st.booleans())
    def start(self, copies: bool) -> None:
        self.now_s = 0.0
        self.kinds = {"a": OURS, "b": OURS, "c": THEIRS, "d": THEIRS}
        self.holds: dict[str, dict[int, tuple[int, ...]]] = {
            "a": {0: (0, 1), 1: (0,)},
            "b": {0: (1,), 1: (0, 4)} if copies else {1: (4,)},
            "c": {0: (2, 3), 1: (1, 2)},
            "d": {0: (3, 2), 1: (2, 3)} if copies else {1: (3,)},
        }
        self.dispatcher = Dispatcher(MAP, deadline_s=MOST_S)
        self.dispatcher.planned({(la, e): THEIRS for w in "cd" for la, es in self.holds[w].items() for e in es})
        self.map = self.dispatcher.class_map
        self.given_up: set[tuple[int, int]] = set()  # experts that went over to the backbone's class
        self.epoch = self.tickets = 0
        self.layer: dict[int, int] = {}
        self.wanted: dict[int, dict[int, int]] = {}  # ticket to experts asked for, with their rows
        self.filled: dict[int, list[int]] = {}
        self.completed: list[int] = []
        self.local: list[tuple[int, int]] = []  # (ticket, expert) to compute here
        self.calls: list[Call] = []  # sent, and not heard of
        self.doubted: set[tuple[int, int]] = set()  # (ticket, expert) of rows that were not finite
        self.checked: set[tuple[int, int]] = set()  # likewise, computed here in another class than theirs
        self.old: list[Call] = []
        for worker in self.holds:
            self.come_in(worker)

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, NewMap):
                self.on_new_map(action)
            elif isinstance(action, Send):
                self.on_send(action.call)
            elif isinstance(action, Fill):
                self.filled[action.call.ticket] += action.call.experts if action.only is None else action.only
            elif isinstance(action, ComputeLocally):
                for expert in action.experts:
                    is_doubted = (action.ticket, expert) in self.doubted
                    assert is_doubted or self.map.of(action.layer, expert) == OURS
                    # Whoever might be asked has not answered a call.
                    busy = {call.worker for call in self.calls}
                    assert is_doubted or busy.issuperset(self.servers(action.layer, expert))
                    self.local.append((action.ticket, expert))
                    self.checked.discard((action.ticket, expert))
            elif isinstance(action, Spare):
                for expert in action.experts:
                    self.local.remove((action.ticket, expert))
            elif isinstance(action, ReportLost):
                self.old += [call for call in self.calls if call.worker == action.worker]
                self.calls = [call for call in self.calls if call.worker != action.worker]
            elif isinstance(action, Complete):
                self.completed.append(action.ticket)
                here = {(ticket, expert) for ticket, expert in self.checked if ticket == action.ticket}
                self.filled[action.ticket] += [expert for _, expert in here]
                self.checked -= here
        assert self.dispatcher.class_map == self.map
        self.somebody_does_each()

    def somebody_does_each(self) -> None:
        """What is not done is being done, by two at most: a worker and its hedge."""
        doers = Counter((call.ticket, expert) for call in self.calls for expert in call.experts)
        doers.update(self.local)
        for ticket in set(self.wanted) - set(self.completed):
            for expert in set(self.wanted[ticket]) - set(self.filled[ticket]):
                if (ticket, expert) not in self.checked:
                    assert 1 <= doers[ticket, expert] <= 2

    def servers(self, layer: int, expert: int) -> list[str]:
        """Who may be asked for an expert."""
        return [
            worker
            for worker, holds in self.holds.items()
            if expert in holds.get(layer, ())
            and self.kinds[worker] == self.map.of(layer, expert)
            and self.dispatcher.standing(worker) is Standing.SERVING
        ]

    def on_send(self, call: Call) -> None:
        load = self.wanted[call.ticket]
        assert (call.layer, call.pairs) == (self.layer[call.ticket], sum(load[e] for e in call.experts))
        assert all(call.worker in self.servers(call.layer, e) for e in call.experts)
        assert self.now_s + min(LATE_S, MOST_S) <= call.deadline_s <= self.now_s + MOST_S
        others = [c for c in self.calls if c.ticket == call.ticket and set(c.experts) & set(call.experts)]
        assert call.worker not in {c.worker for c in others}
        assert {self.kinds[c.worker] for c in others} <= {self.kinds[call.worker]}
        self.checked -= {(call.ticket, expert) for expert in call.experts}
        self.calls.append(call)

    def on_new_map(self, new: NewMap) -> None:
        assert new.before == self.map
        assert not self.given_up & set(new.experts)
        for key in new.experts:
            assert self.map.of(*key) == THEIRS
            assert not self.servers(*key)
        self.given_up |= set(new.experts)
        self.map = self.map.given(dict.fromkeys(new.experts, OURS))
        assert new.after == self.map

    def come_in(self, worker: str) -> None:
        self.epoch += 1
        self.act(self.dispatcher.lost(worker, "it joins again", self.now_s))
        self.act(join(self.dispatcher, worker, self.kinds[worker], self.epoch, self.holds[worker], self.now_s))
        # As if it had answered many calls: in so few steps nobody would.
        self.dispatcher._members[worker].pace = brisk()

    @rule(layer=st.integers(0, 1), load=st.dictionaries(st.integers(0, 4), st.integers(1, 3), max_size=5))
    def issue(self, layer: int, load: dict[int, int]) -> None:
        self.tickets += 1
        self.wanted[self.tickets], self.filled[self.tickets], self.layer[self.tickets] = load, [], layer
        self.act(self.dispatcher.issued(self.tickets, layer, load, WIDTH, self.now_s))

    def taken(self, pick: Any) -> Call:
        call: Call = self.calls.pop(pick.randrange(len(self.calls)))
        self.old.append(call)
        return call

    @precondition(lambda self: self.calls)
    @rule(pick=st.randoms(use_true_random=False))
    def answer(self, pick: Any) -> None:
        self.act(answer(self.dispatcher, self.taken(pick), now_s=self.now_s))

    @precondition(lambda self: self.calls)
    @rule(
        pick=st.randoms(use_true_random=False),
        change=st.sampled_from([{"epoch": 999}, {"shape": (99, WIDTH)}, {"is_finite": False}]),
    )
    def answer_wrongly(self, pick: Any, change: dict[str, Any]) -> None:
        call = self.taken(pick)
        if "is_finite" in change:
            self.doubted |= {(call.ticket, expert) for expert in call.experts}
        self.act(answer(self.dispatcher, call, now_s=self.now_s, **change))

    @precondition(lambda self: self.calls)
    @rule(pick=st.randoms(use_true_random=False))
    def answer_for_another(self, pick: Any) -> None:
        (dropped,) = answer(self.dispatcher, pick.choice(self.calls), now_s=self.now_s, worker="?")
        assert isinstance(dropped, ReportDropped)

    @precondition(lambda self: self.old)
    @rule(pick=st.randoms(use_true_random=False))
    def answer_again(self, pick: Any) -> None:
        (dropped,) = answer(self.dispatcher, pick.choice(self.old), now_s=self.now_s)
        assert isinstance(dropped, ReportDropped)

    @precondition(lambda self: self.calls)
    @rule(pick=st.randoms(use_true_random=False))
    def refuse(self, pick: Any) -> None:
        call = self.taken(pick)
        self.act(self.dispatcher.refused(call.worker, call.seq, "no", self.now_s))

    @precondition(lambda self: self.calls)
    @rule(pick=st.randoms(use_true_random=False))
    def stall(self, pick: Any) -> None:
        self.act(self.dispatcher.unsent(self.taken(pick).seq, self.now_s))

    @rule(worker=st.sampled_from("abcd"))
    def lose(self, worker: str) -> None:
        self.act(self.dispatcher.lost(worker, "gone", self.now_s))

    @rule(worker=st.sampled_from("abcd"))
    def come_back(self, worker: str) -> None:
        self.come_in(worker)

    @rule(seconds=st.one_of(st.floats(0, 5.0), st.floats(0, 2 * MOST_S)))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.act(self.dispatcher.ticked(self.now_s))
        deadline = self.dispatcher.next_deadline()
        assert deadline is None or deadline > self.now_s

    @rule(count=st.integers(1, 3), is_finite=st.sampled_from([True, True, True, False]))
    def compute(self, count: int, is_finite: bool = True) -> None:
        for _ in range(min(count, len(self.local))):
            ticket, expert = self.local.pop(0)
            if not is_finite or self.map.of(self.layer[ticket], expert) == OURS:
                self.filled[ticket].append(expert)
            else:
                self.checked.add((ticket, expert))
            if not is_finite:  # the request will end: what else was computed here for it may stand or not
                self.filled[ticket] += [e for t, e in self.checked if t == ticket]
                self.checked = {(t, e) for t, e in self.checked if t != ticket}
            self.act(self.dispatcher.computed(ticket, expert, self.now_s, is_finite=is_finite))

    @rule(pick=st.randoms(use_true_random=False))
    def forget(self, pick: Any) -> None:
        open_ones = sorted(set(self.wanted) - set(self.completed))
        if open_ones:
            ticket = pick.choice(open_ones)
            self.act(self.dispatcher.forgotten(ticket))
            del self.wanted[ticket], self.filled[ticket]
            self.local = [task for task in self.local if task[0] != ticket]
            self.checked = {(t, e) for t, e in self.checked if t != ticket}
            self.calls, calls = [], self.calls
            for call in calls:
                (self.old if call.ticket == ticket and self.is_ended(call) else self.calls).append(call)

    def is_ended(self, call: Call) -> bool:
        """Whether nobody waits for a call, nor for its worker because of it."""
        return call.seq not in self.dispatcher._calls

    @invariant()
    def each_expert_once(self) -> None:
        if not hasattr(self, "filled"):
            return
        assert len(self.completed) == len(set(self.completed))
        for ticket, experts in self.filled.items():
            assert len(experts) == len(set(experts))
            assert set(experts) <= set(self.wanted[ticket])
            assert (ticket in self.completed) == (set(experts) == set(self.wanted[ticket]))

    def teardown(self) -> None:
        if not hasattr(self, "filled"):
            return
        for worker in self.holds:
            self.act(self.dispatcher.lost(worker, "the end", self.now_s))
        while self.local:
            self.compute(len(self.local))
        assert set(self.wanted) <= set(self.completed)
        assert self.dispatcher.next_deadline() is None


AnyOrder.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestAnyOrder = AnyOrder.TestCase
