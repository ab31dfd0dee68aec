"""Rows from real worker processes over CURVE: the bits of a local computation, however they came."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm_kit import NEVER_S, NoLocal, TinyExperts, ask, by_index, faulty, some_rows, swarm_of

from backbone.swarm import Swarm, WorkerSpec


@pytest.fixture
def model(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf", has_biases=True)


def expected(model: TinyExperts, layer: int, x: Any, ids: Any) -> bytes:
    return model.local().send(layer, x, ids).tobytes()


@pytest.mark.parametrize("workers", [1, 3])
def test_streamed_weights_give_the_local_bits(model: TinyExperts, workers: int) -> None:
    told: list[tuple[str, int, int]] = []
    with swarm_of(model, workers, local=NoLocal(), on_progress=lambda *progress: told.append(progress)) as swarm:
        for layer in range(model.layers):
            for rows in (1, 5):
                x, ids = some_rows(model, rows, chosen=4)
                assert ask(swarm, layer, x, ids).tobytes() == expected(model, layer, x, ids)
        reports = swarm.report()
        assert swarm.local_calls == swarm.dropped == 0
    assert [r.name for r in reports] == [f"local-{i + 1}" for i in range(workers)]
    assert sum(r.experts for r in reports) == model.layers * model.experts
    assert sum(r.rows for r in reports) == model.layers * (1 + 5) * 4
    assert all(r.calls == 2 * model.layers and r.seconds > 0 and not r.failures for r in reports)
    assert {r.numeric_class for r in reports} == {str(model.numeric_class)}
    assert told[-1] == ("experts ready", workers * model.layers, workers * model.layers)


def test_workers_that_map_the_file_give_the_same_bits(model: TinyExperts) -> None:
    with swarm_of(model, 2, share_path=True, local=NoLocal()) as swarm:
        x, ids = some_rows(model)
        assert ask(swarm, 1, x, ids).tobytes() == expected(model, 1, x, ids)


@pytest.mark.parametrize("share_path", [True, False])
def test_of_two_that_hold_an_expert_each_gets_half_of_a_token(model: TinyExperts, share_path: bool) -> None:
    """Where the file is mapped copies are given out at once, else where memory is granted for them."""
    room = 0 if share_path else 1 << 20
    specs = [WorkerSpec(backend="numpy", memory_bytes=room)] * 2
    with Swarm(model, specs, local=NoLocal(), share_path=share_path, hedge_s=NEVER_S) as swarm:
        x, ids = some_rows(model, 1, chosen=4)
        assert ask(swarm, 1, x, ids).tobytes() == expected(model, 1, x, ids)
        assert swarm.busiest_ns == round(max(r.seconds for r in swarm.report()) * 1e9)
        assert [(r.experts, r.rows) for r in swarm.report()] == [(model.layers * model.experts, 2)] * 2


def test_slices_of_many_chunks_arrive_whole(tmp_path: Path) -> None:
    model = TinyExperts(tmp_path / "wide.gguf", layers=1, experts=2, width=320, inner=1100)  # 1.4 MB a slice
    with swarm_of(model, 1, local=NoLocal()) as swarm:
        x, ids = some_rows(model)
        assert ask(swarm, 0, x, ids).tobytes() == expected(model, 0, x, ids)


def test_any_placement_gives_the_same_bits_and_what_nobody_holds_is_computed_here(model: TinyExperts) -> None:
    x, ids = some_rows(model, rows=6, chosen=3)
    random = np.random.default_rng(5)
    holder = {(la, e): int(random.integers(0, 2)) for la in range(3) for e in range(4) if (la, e) != (2, 1)}
    with swarm_of(model, 2, placement=by_index(holder)) as swarm:
        for layer in (0, 1):
            assert ask(swarm, layer, x, ids).tobytes() == expected(model, layer, x, ids)
        assert swarm.local_calls == 0
        assert ask(swarm, 2, x, ids).tobytes() == expected(model, 2, x, ids)
        assert swarm.local_calls == 1
        # The backbone's class is the workers': who computes changes no map.
        assert {kind for kinds in swarm.class_map.experts.values() for kind in kinds} == {str(model.numeric_class)}
        assert swarm.class_changes == []


def test_tickets_may_be_taken_in_any_order(model: TinyExperts) -> None:
    with swarm_of(model, 2, local=NoLocal()) as swarm:
        asked = [(layer, *some_rows(model, rows, seed=rows)) for layer in range(3) for rows in (1, 2, 3)]
        tickets = [swarm.send(*each) for each in asked]
        for ticket, each in reversed(list(zip(tickets, asked, strict=True))):
            assert swarm.wait(ticket).tobytes() == expected(model, *each)
            assert swarm.report()[0].state == "serving"


def test_late_answers_in_another_order_give_the_same_bits(model: TinyExperts) -> None:
    with swarm_of(model, 2, local=NoLocal(), command=faulty("delay:0.003", "reorder")) as swarm:
        asked = [(layer % 3, *some_rows(model, 4, chosen=4, seed=layer)) for layer in range(4)]
        tickets = [swarm.send(*each) for each in asked]
        for ticket, each in zip(tickets, asked, strict=True):
            assert swarm.wait(ticket).tobytes() == expected(model, *each)


def test_sending_returns_while_the_worker_computes(model: TinyExperts) -> None:
    with swarm_of(model, 1, local=NoLocal(), command=faulty("delay:0.2")) as swarm:
        x, ids = some_rows(model, rows=1, chosen=1)
        ticket = swarm.send(0, x, ids)
        assert not swarm.ready(ticket)
        rows = swarm.wait(ticket)
        assert rows.tobytes() == expected(model, 0, x, ids)


def test_an_abandoned_ticket_disturbs_nobody(model: TinyExperts) -> None:
    with swarm_of(model, 2, local=NoLocal()) as swarm:
        x, ids = some_rows(model)
        swarm.send(0, x, ids)
        swarm.send(1, x, ids)
        swarm.abandon()
        assert ask(swarm, 2, x, ids).tobytes() == expected(model, 2, x, ids)
        assert swarm.dropped > 0
        assert not [r for r in swarm.report() if r.failures]


def test_a_workers_own_budget_is_kept(model: TinyExperts) -> None:
    one = sum(len(model.slice_data(name, 0)) for name in model.expert_tensors[0].values())
    command = [sys.executable, "-P", "-m", "worker", "local", "--memory", str(6 * one)]
    with swarm_of(model, 2, local=NoLocal(), command=command) as swarm:
        assert [r.experts for r in swarm.report()] == [6, 6]
    with swarm_of(model, 1, command=command) as swarm:
        assert [r.experts for r in swarm.report()] == [6]


def test_a_budget_is_kept_and_the_rest_told(model: TinyExperts, caplog: pytest.LogCaptureFixture) -> None:
    one = sum(len(model.slice_data(name, 0)) for name in model.expert_tensors[0].values())
    specs = [WorkerSpec(backend="numpy", memory_bytes=4 * one)]
    with (
        caplog.at_level(logging.WARNING),
        Swarm(model, specs, local=model.local(), share_path=False, hedge_s=NEVER_S) as swarm,
    ):
        x, ids = some_rows(model, chosen=4)
        assert ask(swarm, 0, x, ids).tobytes() == expected(model, 0, x, ids)
        assert swarm.report()[0].experts == 4
        assert swarm.local_calls == 1
    assert "8 of 12 experts" in caplog.text
    assert "raise --worker-memory" in caplog.text
