"""Placement invariance: the same bits whoever holds what, however many workers, in any order, in any batch, with any loss.

Real worker processes, CURVE, weights over the wire; one class on both sides: the reference's, then the C kernels'.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import Golden, load
from swarm_kit import NEVER_S, faulty, kill_when

from backbone.engine import Engine
from backbone.local_workers import WorkerSpec
from backbone.model import Model
from backbone.placement import Candidate, Plan, place
from backbone.swarm import Swarm
from kernels.backends.numpy_cpu import NumpyBackend

Find = Callable[[str], Path]
TOKENS = Golden("qwen3moe").data()["tokens"].tolist()[:20]


MODELS = [(b, m) for b in ("numpy", "native") for m in ("qwen3moe", "qwen2moe", "qwen3moe-k256-Q4_K_M")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model(request: pytest.FixtureRequest, arch_model: Find) -> Model:
    backend, name = request.param
    return load(arch_model(name), backend=backend)


@pytest.fixture(scope="module")
def expected(model: Model) -> bytes:
    """The bits of one process, one batch."""
    return bits(Engine(model, model.local_experts, context=64))


def bits(engine: Engine, tokens: Sequence[int] = TOKENS) -> bytes:
    return engine.extend(engine.new_sequence(), tokens, want_all=True).tobytes()


def swarm(model: Model, count: int, **options: Any) -> Swarm:
    options = {"share_path": False, "hedge_s": NEVER_S} | options
    # Workers of one thread and of several: their number is no part of the class.
    specs = [WorkerSpec(backend=model.backend.name, threads=1 + i % 2) for i in range(count)]
    return Swarm(model, specs, local=model.local_experts, **options)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_batches_of_any_size_in_one_process(model: Model, expected: bytes, chunk: int) -> None:
    assert bits(Engine(model, model.local_experts, context=64, chunk_rows=chunk)) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_workers(model: Model, expected: bytes, count: int) -> None:
    with swarm(model, count) as workers:
        for chunk in (1, 7, 64):
            assert bits(Engine(model, workers, context=64, chunk_rows=chunk)) == expected
        assert all(report.calls > 0 and report.state == "serving" for report in workers.report())
        assert workers.local_calls == 0


def shuffled(seed: int, sizes: Mapping[int, Sequence[int]], candidates: Sequence[Candidate], **_: Any) -> Plan:
    """Every expert somewhere, at random; some twice."""
    draw = random.Random(seed)
    holds: dict[str, dict[int, tuple[int, ...]]] = {c.name: {} for c in candidates}
    for layer, experts in sizes.items():
        homes = {e: draw.sample(candidates, draw.choice((1, 2))) for e in range(len(experts))}
        for c in candidates:
            mine = [e for e, held in homes.items() if c in held]
            draw.shuffle(mine)
            if mine:
                holds[c.name][layer] = tuple(mine)
    return Plan(holds, {})


@pytest.mark.parametrize("seed", [1, 2])
def test_shuffled_placements_with_replies_delayed_and_reordered(model: Model, expected: bytes, seed: int) -> None:
    with swarm(model, 3, placement=partial(shuffled, seed), command=faulty("delay:0-0.004")) as workers:
        assert bits(Engine(model, workers, context=64, chunk_rows=7)) == expected
        assert sum(report.calls for report in workers.report()) > 0
        assert workers.local_calls == 0


def test_experts_that_fit_nowhere_are_computed_here(model: Model, expected: bytes) -> None:
    half: Callable[..., Plan] = lambda sizes, candidates, **_: place(  # noqa: E731 - a plan for this test alone
        sizes, [Candidate(name=c.name, memory_bytes=sum(map(sum, sizes.values())) // 2) for c in candidates]
    )
    with swarm(model, 1, placement=half) as workers:
        assert bits(Engine(model, workers, context=64)) == expected
        assert workers.local_calls > 0
        assert workers.report()[0].calls > 0


def test_a_worker_killed_between_two_tokens(model: Model, expected: bytes) -> None:
    with swarm(model, 2) as workers:
        engine = Engine(model, workers, context=64)
        sequence, rows = engine.new_sequence(), []
        for at, token in enumerate(TOKENS):
            if at == 9:
                os.kill(workers.pids()[0], signal.SIGKILL)
            rows.append(engine.step(sequence, token))
        assert np.stack(rows).tobytes() == expected
        states = [report.state for report in workers.report()]
        assert states in (["lost", "serving"], ["lost", "loading"])
        assert workers.local_calls > 0


def test_a_worker_killed_in_the_middle_of_a_call(model: Model, expected: bytes, tmp_path: Path) -> None:
    mark = tmp_path / "in-a-call"
    with swarm(model, 2, command=faulty("delay:0.01", f"mark:{mark}")) as workers:
        killer = threading.Thread(target=kill_when, args=(mark, workers.pids()[1]))
        killer.start()
        assert bits(Engine(model, workers, context=64, chunk_rows=7)) == expected
        killer.join()
        lost = workers.report()[1]
        assert lost.state == "lost"
        assert lost.failures
        assert workers.local_calls > 0


class Recording(NumpyBackend):
    """The reference, with a note of every matrix that is multiplied here."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.names: dict[int, str] = {}

    def program(self, operations: Any, slot_widths: Any) -> Any:
        program = super().program(operations, slot_widths)
        program._bound = tuple(
            replace(bound, function=self.noted(bound)) if bound.operation.name == "matmul" else bound
            for bound in program._bound
        )
        return program

    def noted(self, bound: Any) -> Any:
        address = bound.operation.constants["weight"].data.ctypes.data

        def note(x: Any) -> Any:
            self.log.append(self.names.get(address, "?"))
            return bound.function(x)

        return note


def test_the_shared_expert_runs_while_the_others_are_under_way(arch_model: Find) -> None:
    from archdefs import load_library
    from backbone.model import load_model

    backend = Recording()
    model = load_model(arch_model("qwen2moe"), load_library(), backend)
    backend.names = {model.gguf.data(name).ctypes.data: name for name in model.gguf.tensors}
    with swarm(model, 1, command=faulty("delay:0.05")) as workers:
        source = Noted(workers, backend.log)
        engine = Engine(model, source, context=64)
        engine.extend(engine.new_sequence(), TOKENS[:2])
    for layer in range(3):
        sent, waited = backend.log.index(f"send {layer}"), backend.log.index(f"wait {layer}, not ready")
        assert [n for n in backend.log[sent:waited] if "shexp" in n] == [
            f"blk.{layer}.ffn_gate_shexp.weight",
            f"blk.{layer}.ffn_up_shexp.weight",
            f"blk.{layer}.ffn_down_shexp.weight",
            f"blk.{layer}.ffn_gate_inp_shexp.weight",
        ]


class Noted:
    """An expert source that notes when it is asked and when it is waited for."""

    is_here = False
    busiest_ns = 0
    class_changes = ()
    doubts = 0

    def __init__(self, inner: Swarm, log: list[str]) -> None:
        self._inner, self._log = inner, log
        self._layers: dict[int, int] = {}

    def send(self, layer: int, x: Any, ids: Any) -> int:
        self._log.append(f"send {layer}")
        ticket = self._inner.send(layer, x, ids)
        self._layers[ticket] = layer
        return ticket

    def ready(self, ticket: int) -> bool:
        return self._inner.ready(ticket)

    def wait(self, ticket: int) -> Any:
        self._log.append(f"wait {self._layers[ticket]}, {'ready' if self.ready(ticket) else 'not ready'}")
        return self._inner.wait(ticket)

    def abandon(self) -> None:
        self._inner.abandon()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() == before


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
