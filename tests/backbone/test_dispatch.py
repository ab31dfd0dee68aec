"""Dispatch without sockets: whatever happens in whatever order, each expert of a ticket is done exactly once."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from backbone.dispatch import (
    Action,
    Call,
    Complete,
    ComputeLocally,
    Dispatcher,
    Fill,
    Member,
    ReportDropped,
    ReportLost,
    Send,
    Standing,
    choose,
)

WIDTH, DEADLINE_S = 8, 10.0


def two_workers() -> Dispatcher:
    """`a` holds experts 0 and 1 of layer 0, `b` 2 and 3; nobody holds 4."""
    dispatcher = Dispatcher(deadline_s=DEADLINE_S)
    assert dispatcher.joined("a", 1, {0: (0, 1)}) == []
    assert dispatcher.joined("b", 2, {0: (2, 3)}) == []
    return dispatcher


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
    assert dispatcher.lost("a", "killed") == [
        ReportLost("a", "killed", True),
        ComputeLocally(1, 0, (0,)),
        ComputeLocally(2, 0, (1,)),
    ]
    assert dispatcher.lost("a", "killed again") == []
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
    assert isinstance(dispatcher.refused("b", call.seq, "not mine")[0], ReportDropped)
    lost, local = dispatcher.refused("a", call.seq, "no memory")
    assert lost == ReportLost("a", "it refused call 1, layer 0: no memory", True)
    assert local == ComputeLocally(1, 0, (0,))


def test_a_deadline_loses_the_late_worker_only() -> None:
    dispatcher = two_workers()
    sent(issue(dispatcher, {0: 1}, now_s=5.0))
    sent(issue(dispatcher, {2: 1}, ticket=2, now_s=6.0))
    assert dispatcher.next_deadline() == 15.0
    assert dispatcher.ticked(14.9) == []
    assert dispatcher.ticked(15.0) == [ReportLost("a", "no answer within 10 s", True), ComputeLocally(1, 0, (0,))]
    assert dispatcher.next_deadline() == 16.0


def test_a_full_queue_costs_the_call_and_a_pause() -> None:
    dispatcher = two_workers()
    (first,) = sent(issue(dispatcher, {0: 1}))
    (second,) = sent(issue(dispatcher, {1: 1}, ticket=2))
    assert dispatcher.unsent(second.seq) == [ComputeLocally(2, 0, (1,))]
    assert dispatcher.standing("a") is Standing.STALLED
    assert issue(dispatcher, {0: 1}, ticket=3) == [ComputeLocally(3, 0, (0,))]
    assert answer(dispatcher, first) == [Fill(first), Complete(1)]
    assert dispatcher.standing("a") is Standing.SERVING
    assert sent(issue(dispatcher, {0: 1}, ticket=4))


def test_a_worker_that_comes_back_starts_anew() -> None:
    dispatcher = two_workers()
    (call,) = sent(issue(dispatcher, {0: 1}))
    lost, local = dispatcher.joined("a", 7, {0: (0,)})
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
    a, b = Member("a", 1, {}), Member("b", 1, {})
    assert choose([a, b], {}) is a
    assert choose([a, b], {"a": 1}) is b
    dispatcher = Dispatcher(deadline_s=1)
    dispatcher.joined("a", 1, {0: (0, 1, 2)})
    dispatcher.joined("b", 1, {0: (0, 1)})
    calls = sent(issue(dispatcher, {2: 3, 0: 1, 1: 1}))
    assert {c.worker: c.experts for c in calls} == {"a": (2,), "b": (0, 1)}


class AnyOrder(RuleBasedStateMachine):
    """Workers that answer, lie, stall, die and return in any order, while tickets come and go."""

    calls = Bundle("calls")
    old = Bundle("old")

    @initialize(replicas=st.booleans())
    def start(self, replicas: bool) -> None:
        self.now_s = 0.0
        self.dispatcher = Dispatcher(deadline_s=DEADLINE_S)
        b: dict[int, tuple[int, ...]] = {0: (2, 1), 1: (0, 3)} if replicas else {0: (2,), 1: (3,)}
        self.holds: dict[str, dict[int, tuple[int, ...]]] = {"a": {0: (0, 1), 1: (0,)}, "b": b}
        self.epoch = 0
        self.tickets = 0
        self.wanted: dict[int, set[int]] = {}  # ticket to experts asked for
        self.filled: dict[int, list[int]] = {}
        self.completed: list[int] = []
        self.local: list[tuple[int, int]] = []  # (ticket, expert) to compute here
        self.new: list[Call] = []
        for worker in self.holds:
            self.join(worker)

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.new.append(action.call)
            elif isinstance(action, Fill):
                self.filled[action.call.ticket] += action.call.experts
            elif isinstance(action, ComputeLocally):
                self.local += [(action.ticket, expert) for expert in action.experts]
            elif isinstance(action, Complete):
                self.completed.append(action.ticket)

    def join(self, worker: str) -> None:
        self.epoch += 1
        self.act(self.dispatcher.joined(worker, self.epoch, self.holds[worker]))

    @rule(target=calls, layer=st.integers(0, 1), load=st.dictionaries(st.integers(0, 4), st.integers(1, 3), max_size=5))
    def issue(self, layer: int, load: dict[int, int]) -> list[Call]:
        self.tickets += 1
        self.wanted[self.tickets], self.filled[self.tickets] = set(load), []
        self.new = []
        self.act(self.dispatcher.issued(self.tickets, layer, load, WIDTH, self.now_s))
        for call in self.new:
            assert call.pairs == sum(load[e] for e in call.experts)
            assert set(call.experts) <= set(self.holds[call.worker][layer])
        return self.new

    @rule(target=old, calls=consumes(calls), pick=st.randoms(use_true_random=False))
    def answer_all(self, calls: list[Call], pick: Any) -> list[Call]:
        pick.shuffle(calls)
        for call in calls:
            self.act(answer(self.dispatcher, call))
        return calls

    @rule(
        calls=calls,
        change=st.sampled_from([{"epoch": 999}, {"shape": (99, WIDTH)}, {"is_finite": False}, {"worker": "?"}]),
    )
    def answer_wrongly(self, calls: list[Call], change: dict[str, Any]) -> None:
        for call in calls[:1]:
            self.act(answer(self.dispatcher, call, **change))

    @rule(calls=old)
    def answer_again(self, calls: list[Call]) -> None:
        for call in calls:
            self.act(answer(self.dispatcher, call))

    @rule(calls=calls)
    def refuse(self, calls: list[Call]) -> None:
        for call in calls[-1:]:
            self.act(self.dispatcher.refused(call.worker, call.seq, "no"))

    @rule(calls=calls)
    def stall(self, calls: list[Call]) -> None:
        for call in calls[:1]:
            self.act(self.dispatcher.unsent(call.seq))

    @rule(worker=st.sampled_from("ab"))
    def lose(self, worker: str) -> None:
        self.act(self.dispatcher.lost(worker, "gone"))

    @rule(worker=st.sampled_from("ab"))
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
            assert set(experts) <= self.wanted[ticket]
            assert (ticket in self.completed) == (set(experts) == self.wanted[ticket])

    def teardown(self) -> None:
        if not hasattr(self, "filled"):
            return
        for worker in self.holds:
            self.act(self.dispatcher.lost(worker, "the end"))
        self.compute(len(self.local))
        assert set(self.wanted) <= set(self.completed)
        assert self.dispatcher.next_deadline() is None


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
