"""Workers from elsewhere come and go while answers are made: enrolled, planned for, drained, revoked, back again."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import Golden, load
from join_kit import Joiner
from relay import Relay
from swarm_kit import NEVER_S, NoLocal

from backbone import roster
from backbone.commands.invite import new_invite
from backbone.door import Door
from backbone.engine import Engine
from backbone.invite_book import InviteBook
from backbone.listening import Address
from backbone.local_workers import WorkerSpec
from backbone.model import Model
from backbone.placement import Plan, place
from backbone.swarm import Swarm

Find = Callable[[str], Path]
Start = Callable[..., Joiner]
TOKENS = Golden("qwen3moe").data()["tokens"].tolist()[:20]
PATIENCE_S = 60.0


@pytest.fixture
def book(tmp_path: Path) -> InviteBook:
    return InviteBook({"XDG_STATE_HOME": str(tmp_path / "backbone")})


@pytest.fixture
def model(arch_model: Find) -> Model:
    return load(arch_model("qwen3moe"), backend="numpy")


def free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


def invite(book: InviteBook, swarm: Swarm, uses: int = 1) -> str:
    port, now = int(swarm.endpoint.rpartition(":")[2]), int(time.time())
    return str(new_invite(book, ("127.0.0.1",), port, uses=uses, ttl_s=3600, now=now))


def swarm_of(model: Model, book: InviteBook, specs: list[WorkerSpec] | None = None, **options: Any) -> Swarm:
    door = Door(Address("127.0.0.1", options.pop("port", None) or free_port()), book)
    options = {"local": model.local_experts, "hedge_s": NEVER_S} | options
    return Swarm(model, specs or [], door=door, **options)


def until(swarm: Swarm, is_so: Callable[[], bool]) -> None:
    """Serve what is due until something is so."""
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up, [vars_of(report) for report in swarm.report()]
        swarm.serve_due(0.05)


def vars_of(report: Any) -> tuple[Any, ...]:
    return report.name, report.state, report.experts, report.failures


def serving(swarm: Swarm, count: int) -> Callable[[], bool]:
    return lambda: (
        [r.state for r in swarm.report()].count("serving") == count
        and all(r.experts for r in swarm.report() if r.state == "serving")
    )


def logits(model: Model, swarm: Swarm, chunk: int = 512) -> bytes:
    engine = Engine(model, swarm, context=64, chunk_rows=chunk)
    return engine.extend(engine.new_sequence(), TOKENS, want_all=True).tobytes()


def alone(model: Model) -> bytes:
    engine = Engine(model, model.local_experts, context=64)
    return engine.extend(engine.new_sequence(), TOKENS, want_all=True).tobytes()


def is_back(swarm: Swarm, model: Model, name: str) -> None:
    """A worker serves again under its own name, alone, and nothing is left to the backbone."""
    until(swarm, serving(swarm, 1))
    assert [report.name for report in swarm.report()] == [name]
    local = swarm.local_calls
    assert logits(model, swarm) == alone(model)
    assert swarm.local_calls == local


def test_three_join_one_after_the_other_and_share_what_there_is(
    model: Model, book: InviteBook, start: Start, tmp_path: Path
) -> None:
    expected = alone(model)
    with swarm_of(model, book) as swarm:
        assert logits(model, swarm) == expected
        text = invite(book, swarm, uses=3)
        for count in (1, 2, 3):
            start(tmp_path / f"w{count}", text)
            until(swarm, serving(swarm, count))
            local = swarm.local_calls
            assert logits(model, swarm) == expected
            assert swarm.local_calls == local
        # What an earlier one has it keeps, as copies: it has the room. The last one has its share of every layer.
        third = swarm.report()[2].experts
        assert third >= sum(model.expert_count(layer) // 3 for layer in model.expert_tensors)
        assert all(report.calls for report in swarm.report())
        assert swarm.class_changes == []


def test_one_joins_and_one_dies_while_an_answer_is_made(
    model: Model, book: InviteBook, start: Start, tmp_path: Path
) -> None:
    engine_alone = Engine(model, model.local_experts, context=900)
    tokens = [TOKENS[i % len(TOKENS)] for i in range(800)]
    sequence = engine_alone.new_sequence()
    expected = [engine_alone.step(sequence, token).tobytes() for token in tokens]
    with swarm_of(model, book, [WorkerSpec(backend="numpy")]) as swarm:
        engine, done = Engine(model, swarm, context=900), list[bytes]()
        sequence = engine.new_sequence()
        joiner = start(tmp_path / "w", invite(book, swarm))
        for _ in range(50 * len(tokens)):
            if len(done) == len(tokens):  # whoever joins has not been quick enough: the same once more
                assert done == expected
                assert not joiner.has_ended()
                done, sequence = [], engine.new_sequence()
            done.append(engine.step(sequence, tokens[len(done)]).tobytes())
            reports = swarm.report()
            if len(reports) == 2 and reports[1].calls > 20 and reports[0].state != "lost":
                os.kill(swarm.pids()[0], signal.SIGKILL)
            if reports[0].state == "lost" and reports[1].state == "serving" and reports[1].calls > 60:
                break
        assert done == expected[: len(done)]
        states = [report.state for report in swarm.report()]
        assert states == ["lost", "serving"]
        assert swarm.class_changes == []
        assert not joiner.has_ended()


def test_one_that_leaves_says_so_and_comes_back_as_itself(
    model: Model, book: InviteBook, start: Start, tmp_path: Path
) -> None:
    with swarm_of(model, book) as swarm:
        first = start(tmp_path / "w", invite(book, swarm), "--name", "phone")
        until(swarm, serving(swarm, 1))
        held = swarm.report()[0].experts
        assert first.stop() == (0, first.told().splitlines()[-1])
        until(swarm, lambda: swarm.report()[0].state == "lost")
        assert swarm.report()[0].failures[-1] == "it left: stopped"
        assert swarm.report()[0].experts == 0 < held  # it holds nothing for us now
        assert logits(model, swarm) == alone(model)
        start(tmp_path / "w")
        is_back(swarm, model, "phone")


def test_one_that_left_long_ago_is_forgotten_and_may_come_back(
    model: Model, book: InviteBook, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "MOST_LOST", 0)
    with swarm_of(model, book) as swarm:
        first = start(tmp_path / "w", invite(book, swarm), "--name", "phone")
        until(swarm, serving(swarm, 1))
        assert logits(model, swarm) == alone(model)
        first.stop()
        until(swarm, lambda: not swarm.report())
        assert swarm.earlier.workers == 1
        assert not swarm._dispatcher._members
        assert logits(model, swarm) == alone(model)
        start(tmp_path / "w")
        is_back(swarm, model, "phone")


def test_three_idle_workers_outlast_their_backbone(
    model: Model, book: InviteBook, start: Start, tmp_path: Path
) -> None:
    port = free_port()
    with swarm_of(model, book, port=port) as swarm:
        text = invite(book, swarm, uses=3)
        for i in range(3):
            start(tmp_path / f"w{i}", text)
        until(swarm, serving(swarm, 3))
        names = sorted(report.name for report in swarm.report())
    again = InviteBook({"XDG_STATE_HOME": str(tmp_path / "backbone")})
    with swarm_of(model, again, port=port, local=NoLocal()) as swarm:
        until(swarm, serving(swarm, 3))
        assert sorted(report.name for report in swarm.report()) == names
        assert logits(model, swarm) == alone(model)


def test_a_revoked_worker_is_let_go_and_kept_out(model: Model, book: InviteBook, start: Start, tmp_path: Path) -> None:
    with swarm_of(model, book) as swarm:
        joiner = start(tmp_path / "w", invite(book, swarm), "--name", "phone")
        until(swarm, serving(swarm, 1))
        other = InviteBook({"XDG_STATE_HOME": str(tmp_path / "backbone")})  # as another process has it
        with other.changing() as invites:
            invites.revoke(invites.find("phone")[0])
        until(swarm, lambda: not swarm.report())
        code, line = joiner.end()
        assert code == 1
        assert "this worker was revoked" in line
        assert logits(model, swarm) == alone(model)
        code, line = refused(swarm, start(tmp_path / "w"))
        assert code == 1
        assert "revoked" in line
        assert swarm.refused > 0


def refused(swarm: Swarm, joiner: Joiner) -> tuple[int, str]:
    """How a worker that is not let in ends."""
    until(swarm, joiner.has_ended)
    return joiner.end()


def test_workers_of_another_class_get_what_nobody_holds_when_no_answer_is_in_the_making(
    arch_model: Find, book: InviteBook, start: Start, tmp_path: Path
) -> None:
    model = load(arch_model("qwen3moe"), backend="native")
    with swarm_of(model, book) as swarm:
        own = swarm.class_map.digest
        start(tmp_path / "w", invite(book, swarm))  # numpy
        until(swarm, serving(swarm, 1))
        assert swarm.class_map.digest != own  # a new map, before any answer began
        engine = Engine(model, swarm, context=64)
        row = engine.extend(engine.new_sequence(), TOKENS)[0]
        assert int(np.argmax(row)) == int(
            np.argmax(np.frombuffer(alone(model), np.float32).reshape(len(TOKENS), -1)[-1])
        )
        assert swarm.local_calls == 0
        assert swarm.class_changes == []


def test_while_an_answer_is_made_nobody_of_another_class_is_given_anything(
    arch_model: Find, book: InviteBook, start: Start, tmp_path: Path
) -> None:
    model = load(arch_model("qwen3moe"), backend="native")
    expected = alone(model)
    with swarm_of(model, book) as swarm:
        start(tmp_path / "w", invite(book, swarm))
        seen = threading.Event()
        while not seen.is_set():  # each answer pumps the swarm; none may be of another map than the backbone's own
            assert logits(model, swarm, 1) == expected
            if swarm.report() and swarm.report()[0].state in ("joined", "serving", "loading"):
                seen.set()
        assert logits(model, swarm) == expected
        assert swarm.report()[0].experts == 0
        until(swarm, lambda: swarm.report()[0].experts > 0)


def test_a_half_open_connection_costs_no_answer_and_its_worker_comes_back(
    model: Model, book: InviteBook, start: Start, tmp_path: Path
) -> None:
    expected = alone(model)
    with (
        swarm_of(model, book, [WorkerSpec(backend="numpy")], hedge_s=0.05) as swarm,
        Relay(int(swarm.endpoint.rpartition(":")[2])) as relay,
    ):
        text = str(new_invite(book, ("127.0.0.1",), relay.port, uses=1, ttl_s=3600, now=int(time.time())))
        joiner = start(tmp_path / "w", text, "--name", "far")
        until(swarm, serving(swarm, 2))
        far = swarm.report()[1]
        while far.calls < 20:
            assert logits(model, swarm, chunk=1) == expected
        relay.go_silent()
        give_up = time.monotonic() + PATIENCE_S
        while far.state != "lost":  # it is hedged until its connection or its deadline ends
            assert time.monotonic() < give_up
            assert logits(model, swarm, chunk=1) == expected
        assert far.failures[0] == "its connection is gone" or far.failures[0].startswith("no answer within ")
        relay.forward()
        until(swarm, serving(swarm, 2))
        calls = far.calls
        while far.calls == calls:
            assert logits(model, swarm, chunk=1) == expected
        assert not joiner.has_ended()
        assert swarm.class_changes == []


def test_use_makes_copies_of_what_is_hot_and_speed_gives_shares_without_an_answer_that_stops(
    model: Model, book: InviteBook, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two has room for two thirds of the experts: what is copied is what was asked for most."""
    monkeypatch.setattr("backbone.swarm.ROWS_TO_PLAN", 200)
    expected = alone(model)
    total = sum(
        sum(len(model.slice_data(n, 0)) for n in names.values()) * model.expert_count(la)
        for la, names in model.expert_tensors.items()
    )
    plans = list[Mapping[tuple[int, int], int]]()

    def noted(sizes: Any, candidates: Any, *, usage: Any, fixed: Any) -> Plan:
        plans.append(dict(usage))
        return place(sizes, candidates, usage=usage, fixed=fixed)

    with swarm_of(model, book, placement=noted) as swarm:
        text = invite(book, swarm, uses=2)
        for name in ("a", "b"):
            start(tmp_path / name, text, "--memory", str(total * 2 // 3), "--name", name)
        until(swarm, serving(swarm, 2))
        before = len(plans)
        while len(plans) == before:  # in the middle of an answer, or between two
            assert logits(model, swarm, 4) == expected
        assert sum(plans[-1].values()) > 200
        until(swarm, serving(swarm, 2))
        local = swarm.local_calls
        assert logits(model, swarm, 4) == expected
        assert swarm.local_calls == local
        asked = Counter(plans[-1])
        copied = [key for key in asked if all(key[1] in held(swarm, name, key[0]) for name in ("a", "b"))]
        assert copied
        single = [key for key in asked if key not in copied]
        assert np.mean([asked[key] for key in copied]) > np.mean([asked[key] for key in single])
        assert swarm.class_changes == []


def held(swarm: Swarm, name: str, layer: int) -> frozenset[int]:
    """Experts of a layer that a worker was assigned."""
    assigned = swarm._roster.named(name).assigned.get(layer)
    return frozenset() if assigned is None else assigned.experts


def test_an_invite_made_a_moment_ago_is_known_at_once(
    model: Model, book: InviteBook, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backbone.swarm.BOOK_S", 1e9)  # nobody looks at the book but who is asked at the door
    with swarm_of(model, book) as swarm:
        other = InviteBook({"XDG_STATE_HOME": str(tmp_path / "backbone")})  # as another process has it
        start(tmp_path / "w", invite(other, swarm))
        until(swarm, serving(swarm, 1))


def test_that_a_worker_serves_is_told_once_a_join(
    model: Model, book: InviteBook, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is planned for: others come, and some of what it holds is known to be asked for more."""
    caplog.set_level("INFO", "expertswarm.workers")

    def told() -> list[str]:
        return [r.getMessage().partition(":")[0] for r in caplog.records if r.name == "expertswarm.workers"]

    with swarm_of(model, book) as swarm:
        text = invite(book, swarm, uses=2)
        first = start(tmp_path / "a", text, "--name", "a")
        until(swarm, serving(swarm, 1))
        assert told() == ["worker a serves"]
        start(tmp_path / "b", text, "--name", "b")
        until(swarm, serving(swarm, 2))
        until(swarm, lambda: logits(model, swarm) == alone(model))
        assert told() == ["worker a serves", "worker b serves"]
        first.stop()
        until(swarm, lambda: swarm.report()[0].state == "lost")
        start(tmp_path / "a")
        until(swarm, serving(swarm, 2))
        assert told() == ["worker a serves", "worker b serves", "worker a serves"]
