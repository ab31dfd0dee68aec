"""Dispatch without sockets: whatever happens in whatever order, each expert of a ticket is done exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backbone.class_map import ClassMap
from backbone.dispatch import (
    Action,
    Call,
    Complete,
    ComputeLocally,
    Dispatcher,
    Fill,
    Member,
    NewMap,
    ReportDropped,
    ReportLost,
    Send,
    Standing,
    choose,
)

WIDTH, DEADLINE_S = 8, 10.0
OURS, THEIRS = "ours", "theirs"  # the backbone's class, and another
MAP = ClassMap.of_backbone(OURS, {0: 5, 1: 5})


def serving(
    *workers: tuple[str, str, Mapping[int, tuple[int, ...]]], theirs: tuple[tuple[int, int], ...] = ()
) -> Dispatcher:
    """Workers by name, class and what they hold; `theirs`: each (layer, expert) that the plan gives the other class."""
    dispatcher = Dispatcher(MAP, deadline_s=DEADLINE_S)
    dispatcher.planned(dict.fromkeys(theirs, THEIRS))
    for epoch, (name, kind, holds) in enumerate(workers, 1):
        assert dispatcher.joined(name, kind, epoch, holds, 0.0) == []
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
    assert dispatcher.computed(1, 1) == []
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
    assert dispatcher.computed(1, 1) == [Complete(1)]
    assert issue(dispatcher, {0: 1}, ticket=3) == [ComputeLocally(3, 0, (0,))]


def test_the_second_answer_and_a_strangers_are_dropped() -> None:
    dispatcher = two_workers()
    (call,) = sent(issue(dispatcher, {0: 1}))
    assert isinstance(answer(dispatcher, call, worker="b")[0], ReportDropped)
    assert isinstance(answer(dispatcher, call, seq=99)[0], ReportDropped)
    assert answer(dispatcher, call) == [Fill(call), Complete(1)]
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)
    assert dispatcher.standing("a") is Standing.SERVING


def test_garbage_costs_a_worker_its_trust() -> None:
    for changes, told in (
        ({"epoch": 9}, "epoch 9, asked of epoch 1"),
        ({"shape": (2, WIDTH)}, "rows (2, 8), asked for (1, 8)"),
        ({"shape": (1, WIDTH + 1)}, "rows (1, 9), asked for (1, 8)"),
        ({"is_finite": False}, "not finite"),
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
    sent(issue(dispatcher, {0: 1}, now_s=5.0))
    sent(issue(dispatcher, {2: 1}, ticket=2, now_s=6.0))
    assert dispatcher.next_deadline() == 15.0
    assert dispatcher.ticked(14.9) == []
    assert dispatcher.ticked(15.0) == [ReportLost("a", 1, "no answer within 10 s", True), ComputeLocally(1, 0, (0,))]
    assert dispatcher.next_deadline() == 16.0


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
    lost, local = dispatcher.joined("a", OURS, 7, {0: (0,)}, 1.0)
    assert isinstance(lost, ReportLost)
    assert local == ComputeLocally(1, 0, (0,))
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)
    (again,) = sent(issue(dispatcher, {0: 1}, ticket=2))
    assert (again.worker, again.epoch) == ("a", 7)


def test_a_forgotten_ticket_leaves_nothing_behind() -> None:
    dispatcher = two_workers()
    (call,) = sent(issue(dispatcher, {0: 1, 4: 1}))
    assert dispatcher.forgotten(1) == []
    assert dispatcher.next_deadline() is None
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)
    assert dispatcher.computed(1, 1) == []
    assert dispatcher.standing("a") is Standing.SERVING


def test_the_least_loaded_holder_is_chosen() -> None:
    a, b = Member("a", OURS, 1, {}), Member("b", OURS, 1, {})
    assert choose([a, b], {}) is a
    assert choose([a, b], {"a": 1}) is b
    dispatcher = serving(("a", OURS, {0: (0, 1, 2)}), ("b", OURS, {0: (0, 1)}))
    calls = sent(issue(dispatcher, {2: 3, 0: 1, 1: 1}))
    assert {c.worker: c.experts for c in calls} == {"a": (2,), "b": (0, 1)}


A, B, C = {0: (0, 1)}, {0: (0, 1)}, {0: (1,)}
IF_THEIRS: dict[str, tuple[tuple[int, int], ...]] = {OURS: (), THEIRS: ((0, 0), (0, 1))}


def undone(how: str, dispatcher: Dispatcher, call: Call) -> list[Action]:
    """What happens to a call that its worker does not do."""
    if how == "garbage":
        return answer(dispatcher, call, is_finite=False, now_s=7.0)
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
    dispatcher.joined("b", kind, 2, B, 0.0)
    dispatcher.joined("c", kind, 3, C, 0.0)
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
    assert dispatcher.computed(1, 1) == [Complete(1)]


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
    assert dispatcher.joined("a", THEIRS, 8, a, 2.0) == []
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
    assert dispatcher.joined("a", OURS, 7, a, 3.0) == []
    assert isinstance(answer(dispatcher, call)[0], ReportDropped)  # the stalled one serves again
    (call,) = sent(issue(dispatcher, {1: 1}, ticket=2))
    _, new, again = dispatcher.lost("b", "killed", 4.0)
    assert isinstance(new, NewMap)
    assert (call.worker, new.experts) == ("b", ((0, 1),))
    assert [(c.worker, c.experts) for c in sent([again])] == [("a", (1,))]


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
        self.dispatcher = Dispatcher(MAP, deadline_s=DEADLINE_S)
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
        self.old: list[Call] = []
        for worker in self.holds:
            self.join(worker)

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, NewMap):
                self.on_new_map(action)
            elif isinstance(action, Send):
                self.on_send(action.call)
            elif isinstance(action, Fill):
                self.filled[action.call.ticket] += action.call.experts
            elif isinstance(action, ComputeLocally):
                for expert in action.experts:
                    assert self.map.of(action.layer, expert) == OURS
                    assert not self.servers(action.layer, expert)
                    self.local.append((action.ticket, expert))
            elif isinstance(action, Complete):
                self.completed.append(action.ticket)
        assert self.dispatcher.class_map == self.map

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
        assert call.deadline_s == self.now_s + DEADLINE_S
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

    def join(self, worker: str) -> None:
        self.epoch += 1
        self.act(self.dispatcher.lost(worker, "it joins again", self.now_s))
        self.act(self.dispatcher.joined(worker, self.kinds[worker], self.epoch, self.holds[worker], self.now_s))

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
        self.act(answer(self.dispatcher, self.taken(pick), now_s=self.now_s, **change))

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
        self.join(worker)

    @rule(seconds=st.floats(0, 2 * DEADLINE_S))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.act(self.dispatcher.ticked(self.now_s))
        deadline = self.dispatcher.next_deadline()
        assert deadline is None or deadline > self.now_s

    @rule(count=st.integers(1, 3))
    def compute(self, count: int) -> None:
        for ticket, expert in self.local[:count]:
            if ticket in self.filled:
                self.filled[ticket].append(expert)
            self.act(self.dispatcher.computed(ticket, 1))
        del self.local[:count]

    @rule(pick=st.randoms(use_true_random=False))
    def forget(self, pick: Any) -> None:
        open_ones = sorted(set(self.wanted) - set(self.completed))
        if open_ones:
            ticket = pick.choice(open_ones)
            self.act(self.dispatcher.forgotten(ticket))
            del self.wanted[ticket], self.filled[ticket]
            self.local = [task for task in self.local if task[0] != ticket]

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
        self.compute(len(self.local))
        assert set(self.wanted) <= set(self.completed)
        assert self.dispatcher.next_deadline() is None


AnyOrder.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestAnyOrder = AnyOrder.TestCase
