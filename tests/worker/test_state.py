"""The worker's state machine without sockets."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from wire import slice_of

from protocol.messages import (
    MAX_CHUNK_BYTES,
    Assign,
    Drain,
    Failed,
    Fetch,
    Goodbye,
    Ready,
    Refused,
    Run,
    Welcome,
)
from worker.actions import (
    Action,
    Check,
    Compute,
    End,
    Ignored,
    Keep,
    Load,
    Progress,
    Send,
    SendAttach,
    SendFetch,
    SendHello,
    Store,
)
from worker.chunk_size import LEAST_BYTES, LEAST_IN_FLIGHT_BYTES
from worker.state import MOST_EPOCHS, UNSTORED_BYTES, Phase, WorkerState


def sha(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def assign(epoch: int, layer: int, *numbers: int) -> Assign:
    return Assign(epoch, layer, "silu", tuple(slice_of("gate", sha(n)) for n in numbers))


IN_FLIGHT = LEAST_IN_FLIGHT_BYTES // LEAST_BYTES  #: chunks, of a line of which nothing is known


CLOCK = itertools.count()


def came(state: WorkerState, sha256: bytes, offset: int, length: int, *, line_s: float = 1.0) -> list[Action]:
    """A chunk came, over a line that takes so many seconds for each."""
    return state.chunk_came(sha256, offset, length, line_s * next(CLOCK))


def serving(**options: Any) -> WorkerState:
    state = WorkerState(**options)
    state.welcomed(Welcome("w"))
    state.weights_connected()
    return state


def of(kind: type[Any], actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def fetches(actions: list[Action]) -> list[Fetch]:
    return [action.message for action in of(SendFetch, actions)]


def test_it_greets_after_each_handshake() -> None:
    state = WorkerState()
    assert state.calls_connected() == [SendHello()]
    assert state.weights_connected() == [SendAttach()]
    state.welcomed(Welcome("w"))
    assert (state.phase, state.name) == (Phase.SERVING, "w")
    assert state.calls_connected() == [SendHello()]


def test_it_gives_up_when_nobody_answers() -> None:
    state = WorkerState()
    assert state.ticked(100.0) == []
    assert state.ticked(160.0) == []
    assert state.ticked(160.1) == [End("no answer from the backbone within 60 s", may_retry=True)]
    assert state.phase is Phase.ENDED
    assert serving().ticked(1e9) == []


def test_it_leaves_when_refused_or_let_go() -> None:
    state = WorkerState()
    assert state.refused(Refused("old version")) == [End("refused by the backbone: old version")]
    state = serving()
    assert state.drained(Drain("done")) == [Send(Goodbye("drained")), End("")]
    assert state.phase is Phase.ENDED


def test_chunks_are_asked_for_in_order_and_few_at_a_time() -> None:
    state = serving()
    size = 5 * LEAST_BYTES + 7
    first = fetches(state.assigned(assign(1, 0, 1), [size]))
    assert first == [Fetch(sha(1), i * LEAST_BYTES, LEAST_BYTES) for i in range(IN_FLIGHT)]
    actions = came(state, sha(1), 0, LEAST_BYTES)
    assert actions == [
        Store(sha(1), size, 0),
        Progress(LEAST_BYTES, size),
        SendFetch(Fetch(sha(1), 4 * LEAST_BYTES, LEAST_BYTES)),
    ]
    assert fetches(came(state, sha(1), LEAST_BYTES, LEAST_BYTES)) == [Fetch(sha(1), 5 * LEAST_BYTES, 7)]


def test_chunks_that_were_not_asked_for_are_ignored() -> None:
    state = serving()
    assert of(Ignored, came(state, sha(1), 0, 10))
    state.assigned(assign(1, 0, 1), [2 * LEAST_BYTES])
    for sha256, offset, length in (
        (sha(2), 0, LEAST_BYTES),
        (sha(1), LEAST_BYTES, LEAST_BYTES),
        (sha(1), 0, LEAST_BYTES - 1),
    ):
        assert of(Ignored, came(state, sha256, offset, length))
    assert of(Store, came(state, sha(1), 0, LEAST_BYTES))
    assert of(Ignored, came(state, sha(1), 0, LEAST_BYTES))


def test_a_layer_is_loaded_when_its_last_slice_is_right() -> None:
    state = serving()
    task = assign(3, 5, 1, 2)
    state.assigned(task, [10, 20])
    came(state, sha(1), 0, 10)
    assert state.slice_right(sha(1)) == []
    came(state, sha(2), 0, 20)
    assert state.slice_right(sha(2)) == [Load(task)]
    assert state.asked(Run(1, 3, 5)) == [Send(Failed(1, 3, "no experts of layer 5 are held here"))]
    assert state.loaded(task) == [Send(Ready(3, 5))]
    assert state.asked(Run(1, 3, 5)) == [Compute(Run(1, 3, 5))]
    assert set(state.cached()) == {sha(1), sha(2)}


def test_a_call_of_another_epoch_is_refused() -> None:
    state = serving(has_file=True)
    task = Assign(3, 5, "silu", (slice_of("gate"),))
    assert state.assigned(task, [10]) == [Keep(frozenset({b""}), 5), Load(task)]
    state.loaded(task)
    (refusal,) = state.asked(Run(9, 4, 5))
    assert refusal == Send(Failed(9, 4, "layer 5 is of epoch 3 here, asked for is epoch 4"))


def test_slices_in_common_are_fetched_once() -> None:
    state = serving()
    one, two = assign(1, 0, 1, 2), assign(1, 1, 2)
    assert len(fetches(state.assigned(one, [10, 10]))) == 2
    assert fetches(state.assigned(two, [10])) == []
    came(state, sha(1), 0, 10)
    came(state, sha(2), 0, 10)
    state.slice_right(sha(1))
    assert state.slice_right(sha(2)) == [Load(one), Load(two)]
    three = assign(1, 2, 1)
    assert state.assigned(three, [10]) == [Keep(frozenset({sha(1), sha(2)}), 2), Load(three)]


def test_a_new_epoch_keeps_what_it_can_use_and_lets_go_of_the_rest() -> None:
    state = serving()
    state.assigned(assign(1, 0, 1, 2), [10, 10])
    for number in (1, 2):
        came(state, sha(number), 0, 10)
        state.slice_right(sha(number))
    actions = state.assigned(assign(2, 0, 2, 3), [10, 10])
    assert of(Keep, actions) == [Keep(frozenset({sha(2), sha(3)}), 0)]
    assert [f.sha256 for f in fetches(actions)] == [sha(3)]
    assert state.cached() == (sha(2),)
    assert state.loaded(assign(1, 0, 1, 2)) == []


def test_a_wrong_slice_is_fetched_once_more_then_given_up() -> None:
    state = serving()
    state.assigned(assign(4, 0, 1), [10])
    came(state, sha(1), 0, 10)
    assert fetches(state.slice_wrong(sha(1))) == [Fetch(sha(1), 0, 10)]
    assert of(Progress, came(state, sha(1), 0, 10)) == [Progress(10, 10)]
    (failure,) = of(Send, state.slice_wrong(sha(1)))
    assert failure.message.epoch == 4
    assert "arrived 2 times with another sha256" in failure.message.reason
    assert of(Send, state.asked(Run(1, 4, 0)))


def test_the_memory_budget_counts_all_layers_also_those_on_their_way() -> None:
    state = serving(memory_bytes=25)
    assert fetches(state.assigned(assign(1, 0, 1), [10]))
    assert fetches(state.assigned(assign(1, 1, 2), [10]))
    (refusal,) = state.assigned(assign(1, 2, 3), [6])
    assert refusal == Send(
        Failed(0, 1, "layer 2 needs 6 bytes beside 20 assigned before; this worker's memory is 25 bytes")
    )
    assert of(Keep, state.assigned(assign(2, 1, 2, 3), [9, 6]))


def test_slices_need_a_hash_unless_the_file_is_here() -> None:
    nameless = Assign(1, 0, "silu", (slice_of("gate"),))
    (refusal,) = of(Send, serving().assigned(nameless, [10]))
    assert "without a sha256, and no model file" in refusal.message.reason
    assert of(Load, serving(has_file=True).assigned(nameless, [10]))


def test_what_cannot_be_loaded_is_told() -> None:
    state = serving(has_file=True)
    task = Assign(1, 0, "silu", (slice_of("gate"),))
    state.assigned(task, [10])
    assert state.not_loaded(task, "no\nsuch tensor") == [Send(Failed(0, 1, "no such tensor"))]
    assert of(Send, state.asked(Run(1, 1, 0)))


def test_nothing_is_fetched_before_the_connection_for_weights_is_up() -> None:
    state = WorkerState()
    assert fetches(state.assigned(assign(1, 0, 1), [10])) == []
    assert state.weights_connected() == [SendAttach(), SendFetch(Fetch(sha(1), 0, 10))]


def test_a_broken_connection_for_weights_asks_again() -> None:
    state = serving()
    state.assigned(assign(1, 0, 1), [2 * LEAST_BYTES])
    came(state, sha(1), 0, LEAST_BYTES)
    assert state.weights_connected() == [SendAttach(), SendFetch(Fetch(sha(1), LEAST_BYTES, LEAST_BYTES))]


def test_what_lies_here_is_checked_and_not_fetched() -> None:
    state = serving()
    task = assign(1, 0, 1, 2)
    actions = state.assigned(task, [10, 10], [10, 0])
    assert of(Check, actions) == [Check(task.slices[0], 10)]
    assert fetches(actions) == [Fetch(sha(2), 0, 10)]
    assert state.slice_right(sha(1)) == []
    came(state, sha(2), 0, 10)
    assert state.slice_right(sha(2)) == [Load(task)]


def test_what_is_not_what_it_seemed_is_fetched_with_all_its_attempts() -> None:
    state = serving()
    state.assigned(assign(1, 0, 1), [10], [10])
    assert fetches(state.slice_wrong(sha(1))) == [Fetch(sha(1), 0, 10)]
    came(state, sha(1), 0, 10)
    assert fetches(state.slice_wrong(sha(1))) == [Fetch(sha(1), 0, 10)]
    came(state, sha(1), 0, 10)
    assert of(Send, state.slice_wrong(sha(1)))


def test_the_rest_of_what_began_is_fetched() -> None:
    state = serving()
    actions = state.assigned(assign(1, 0, 1), [2 * LEAST_BYTES], [LEAST_BYTES + 5])
    assert fetches(actions) == [Fetch(sha(1), LEAST_BYTES + 5, LEAST_BYTES - 5)]
    (progress,) = of(Progress, came(state, sha(1), LEAST_BYTES + 5, LEAST_BYTES - 5))
    assert progress == Progress(2 * LEAST_BYTES, 2 * LEAST_BYTES)


def test_over_a_line_that_carries_much_more_is_asked_for_at_once() -> None:
    state, size = serving(), 64 * MAX_CHUNK_BYTES
    asked = fetches(state.assigned(assign(1, 0, 1), [size]))
    lengths = list[int]()
    while asked:
        fetch = asked.pop(0)
        lengths.append(fetch.length)
        asked += fetches(came(state, fetch.sha256, fetch.offset, fetch.length, line_s=1e-4))
        state.chunk_stored(fetch.length)
    assert sum(lengths) == size
    assert lengths[0] == LEAST_BYTES
    assert set(lengths[-20:]) == {MAX_CHUNK_BYTES}
    state.weights_connected()  # another line, perhaps
    (first, *_) = fetches(state.assigned(assign(2, 1, 2), [size]))
    assert first.length == LEAST_BYTES


def test_no_more_is_asked_for_than_can_be_put_away() -> None:
    state, size = serving(), 2 * UNSTORED_BYTES
    asked = fetches(state.assigned(assign(1, 0, 1), [size]))
    arrived = 0
    while asked:
        fetch = asked.pop(0)
        arrived += fetch.length
        asked += fetches(came(state, fetch.sha256, fetch.offset, fetch.length))
    assert UNSTORED_BYTES <= arrived <= UNSTORED_BYTES + IN_FLIGHT * LEAST_BYTES
    for _ in range(IN_FLIGHT):
        asked += fetches(state.chunk_stored(LEAST_BYTES))
    assert asked[0].offset == arrived


def held(*layers: int, **options: Any) -> WorkerState:
    """A state that holds these layers, slice n for layer n, 10 bytes each."""
    state = serving(**options)
    for layer in layers:
        state.assigned(task := assign(1, layer, layer), [10])
        came(state, sha(layer), 0, 10)
        state.slice_right(sha(layer))
        state.loaded(task)
    return state


def again(state: WorkerState) -> None:
    assert state.session_began() == []
    state.welcomed(Welcome("w"))
    state.weights_connected()


def test_a_new_session_keeps_slices_and_no_promises() -> None:
    state = held(1, 2)
    assert state.experts_held() == 2
    again(state)
    assert state.experts_held() == 0
    assert state.asked(Run(1, 1, 1)) == [Send(Failed(1, 1, "no experts of layer 1 are held here"))]
    task = assign(1, 1, 1)
    assert state.assigned(task, [10]) == [Keep(frozenset({sha(1), sha(2)}), 1), Load(task)]
    state.loaded(task)
    assert state.experts_held() == 1
    # The first call shows that layer 2 is not wanted any more.
    assert state.asked(Run(1, 1, 1)) == [Keep(frozenset({sha(1)}), 2), Compute(Run(1, 1, 1))]
    assert state.asked(Run(2, 1, 1)) == [Compute(Run(2, 1, 1))]
    assert state.cached() == (sha(1),)


def test_what_an_earlier_session_left_makes_room() -> None:
    state = held(1, 2, memory_bytes=25)
    again(state)
    actions = state.assigned(assign(1, 3, 3), [10])
    assert of(Keep, actions) == [Keep(frozenset(), 1), Keep(frozenset(), 2), Keep(frozenset({sha(3)}), 3)]
    assert fetches(actions) == [Fetch(sha(3), 0, 10)]
    again(state)
    (refusal,) = of(Send, state.assigned(assign(1, 3, 3), [26]))
    assert "needs 26 bytes beside 0 assigned before" in refusal.message.reason


def test_nothing_of_an_earlier_session_is_taken_for_this_ones() -> None:
    state = serving()
    task = assign(1, 0, 1)
    state.assigned(task, [10])
    came(state, sha(1), 0, 10)
    again(state)
    assert state.slice_right(sha(1)) == state.slice_wrong(sha(1)) == state.loaded(task) == []
    assert of(Ignored, came(state, sha(1), 0, 10))
    assert fetches(state.assigned(task, [10])) == [Fetch(sha(1), 0, 10)]
    assert state.slice_wrong(sha(1)) == []  # a late word on the chunk of before
    assert state.slice_right(sha(1)) == [Load(task)]
    assert of(Ignored, came(state, sha(1), 0, 10))  # found here meanwhile


def test_it_says_goodbye_when_it_is_stopped() -> None:
    state = serving()
    assert state.stopped() == [Send(Goodbye("stopped")), End("")]
    assert state.phase is Phase.ENDED


class AnyDownload(RuleBasedStateMachine):
    """Assignments come and are replaced while their slices arrive, some of them wrong."""

    @initialize(line_s=st.sampled_from([1.0, 1e-6]))
    def start(self, line_s: float) -> None:
        self.line_s = line_s
        self.state = serving(memory_bytes=100 * LEAST_BYTES)
        self.sizes = {n: (n % 3) * 5 * LEAST_BYTES + 1 + n for n in range(8)}
        self.asked: list[Fetch] = []
        self.done: dict[bytes, int] = {}
        self.right: set[bytes] = set()
        self.epoch = 0
        self.latest: dict[int, Assign] = {}
        self.ready: list[tuple[int, int]] = []
        self.failed: list[int] = []

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendFetch):
                self.asked.append(action.message)
            elif isinstance(action, Keep):
                self.right &= action.slices
                self.done = {k: v for k, v in self.done.items() if k in action.slices}
            elif isinstance(action, Load):
                assert {p.sha256 for p in action.assign.slices} <= self.right
                self.act(self.state.loaded(action.assign))
            elif isinstance(action, Send) and isinstance(action.message, Ready):
                self.ready.append((action.message.epoch, action.message.layer))
            elif isinstance(action, Send) and isinstance(action.message, Failed):
                self.failed.append(action.message.epoch)

    @rule(layer=st.integers(0, 2), numbers=st.sets(st.integers(0, 7), min_size=1))
    def assign(self, layer: int, numbers: set[int]) -> None:
        self.epoch += 1
        self.latest[layer] = task = assign(self.epoch, layer, *sorted(numbers))
        self.act(self.state.assigned(task, [self.sizes[n] for n in sorted(numbers)]))

    @precondition(lambda self: self.asked)
    @rule(is_right=st.sampled_from([True, True, True, False]))
    def arrive(self, is_right: bool) -> None:
        fetch = self.asked.pop(0)
        actions = came(self.state, fetch.sha256, fetch.offset, fetch.length, line_s=self.line_s)
        (store,) = of(Store, actions)
        assert store.offset == self.done.get(fetch.sha256, 0)
        self.done[fetch.sha256] = fetch.offset + fetch.length
        self.act(actions)
        self.act(self.state.chunk_stored(fetch.length))
        if self.done[fetch.sha256] == store.size:
            del self.done[fetch.sha256]
            if is_right:
                self.right.add(fetch.sha256)
            self.act((self.state.slice_right if is_right else self.state.slice_wrong)(fetch.sha256))

    @rule(number=st.integers(0, 7), offset=st.sampled_from([0, 1, LEAST_BYTES]))
    def stray(self, number: int, offset: int) -> None:
        if not self.asked or (self.asked[0].sha256, self.asked[0].offset) != (sha(number), offset):
            assert of(Ignored, came(self.state, sha(number), offset, 1))

    @invariant()
    def never_more_than_a_few_in_flight(self) -> None:
        if hasattr(self, "asked"):
            assert sum(fetch.length for fetch in self.asked) <= max(LEAST_IN_FLIGHT_BYTES, 2 * MAX_CHUNK_BYTES)
            assert len(self.ready) == len(set(self.ready))

    def teardown(self) -> None:
        if not hasattr(self, "asked"):
            return
        while self.asked:
            self.arrive(True)
        for layer, task in self.latest.items():
            assert ((task.epoch, layer) in self.ready) != (task.epoch in self.failed)


AnyDownload.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAnyDownload = AnyDownload.TestCase


def hold(state: WorkerState, task: Assign, *sizes: int) -> list[Action]:
    """Fetch and load an assignment's slices, those that are not here already."""
    state.assigned(task, list(sizes))
    for piece, size in zip(task.slices, sizes, strict=True):
        came(state, piece.sha256, 0, size)
        state.slice_right(piece.sha256)
    return state.loaded(task)


def test_what_a_layer_had_before_serves_until_the_next_is_here() -> None:
    """A re-balance must not stop calls: those of the old epoch are computed, also when they come after the change."""
    state = serving()
    assert hold(state, assign(1, 0, 1, 2), 10, 10) == [Send(Ready(1, 0))]
    again = assign(2, 0, 2, 3)
    actions = state.assigned(again, [10, 10])
    assert actions[0] == Keep(frozenset({sha(1), sha(2), sha(3)}))
    assert state.asked(Run(7, 1, 0)) == [Compute(Run(7, 1, 0))]
    reason = "layer 0 is of epoch 1 here, asked for is epoch 2"
    assert state.asked(Run(8, 2, 0)) == [Send(Failed(8, 2, reason))]
    came(state, sha(3), 0, 10)
    assert state.slice_right(sha(3)) == [Load(again)]
    assert state.loaded(again) == [Keep(frozenset({sha(2), sha(3)})), Send(Ready(2, 0))]
    assert state.asked(Run(9, 1, 0)) == [Compute(Run(9, 1, 0))]
    assert state.asked(Run(10, 2, 0)) == [Compute(Run(10, 2, 0))]


def test_without_room_for_both_the_earlier_experts_go_first() -> None:
    state = serving(memory_bytes=25)
    hold(state, assign(1, 0, 1, 2), 10, 10)
    assert state.assigned(assign(2, 0, 2, 3), [10, 10])[0] == Keep(frozenset({sha(2), sha(3)}), 0)
    assert state.asked(Run(7, 1, 0)) == [Send(Failed(7, 1, "no experts of layer 0 are held here"))]
    fewer = serving(memory_bytes=25)
    hold(fewer, assign(1, 0, 1, 2), 10, 10)
    assert fewer.assigned(assign(2, 0, 2), [10])[0] == Keep(frozenset({sha(1), sha(2)}))  # fewer need no more
    assert fewer.asked(Run(7, 1, 0)) == [Compute(Run(7, 1, 0))]


def test_an_assignment_that_fails_leaves_the_one_before() -> None:
    state = serving()
    hold(state, assign(1, 0, 1), 10)
    broken = assign(2, 0, 1, 2)
    state.assigned(broken, [10, 10])
    assert state.not_loaded(broken, "no") == [Send(Failed(0, 2, "no"))]
    assert state.asked(Run(7, 1, 0)) == [Compute(Run(7, 1, 0))]
    assert state.experts_held() == 1
    state.session_began()
    state.welcomed(Welcome("w"))
    assert state.asked(Run(7, 1, 0)) == [Send(Failed(7, 1, "no experts of layer 0 are held here"))]


def test_a_slice_of_any_size_takes_no_memory_before_it_comes() -> None:
    state, most = serving(), 1 << 40
    asked = fetches(state.assigned(assign(1, 0, 1, 2), [most, most]))
    assert [(f.offset, f.length) for f in asked] == [(i * LEAST_BYTES, LEAST_BYTES) for i in range(IN_FLIGHT)]
    assert len(state._wanted) + len(state._in_flight) <= 2 + IN_FLIGHT
    (after,) = fetches(came(state, sha(1), 0, LEAST_BYTES))
    assert (after.sha256, after.offset) == (sha(1), IN_FLIGHT * LEAST_BYTES)


def test_assignments_without_end_are_forgotten() -> None:
    state = serving()
    state._here.add(sha(1))
    for epoch in range(1, 3 * MOST_EPOCHS):
        state.assigned(assign(epoch, 0, 1), [4], [4])
        state.slice_right(sha(1))
        state.loaded(assign(epoch, 0, 1))
    assert len(state._layers[0].epochs) == MOST_EPOCHS
    assert of(Compute, state.asked(Run(1, 3 * MOST_EPOCHS - 1, 0)))
