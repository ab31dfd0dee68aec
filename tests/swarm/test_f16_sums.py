"""A worker that sums in F16 beside a backbone that does not: a mixed swarm, whose map says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_kit import device_backend
from goldens import load, relative_l2
from swarm_kit import NoLocal, TinyExperts, ask, some_rows

from backbone.discovery import DEMO
from backbone.engine import Engine
from backbone.local_workers import WorkerSpec
from backbone.swarm import Swarm

WORKER = Path(__file__).parents[1] / "support" / "shim_worker.py"
TOKENS = [5, 300, 41, 7]
OWN, THEIRS = "canonical-1/f32/f32", "canonical-1/f32/f16"


@pytest.fixture
def shim_command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What starts a worker on the CUDA branch."""
    monkeypatch.setenv("PYTHONPATH", str(WORKER.parent))
    return [sys.executable, str(WORKER)]


def one_worker(model: Any, command: list[str], **options: Any) -> Swarm:
    spec = WorkerSpec(backend="cuda", accumulation="f16")
    return Swarm(model, [spec], local=NoLocal(), command=command, **options)


def test_its_rows_are_its_class_s_and_the_map_names_it(tmp_path: Path, shim_command: list[str]) -> None:
    model = TinyExperts(tmp_path / "tiny.gguf")
    x, ids = some_rows(model)
    with one_worker(model, shim_command, share_path=False) as workers:
        rows = ask(workers, 1, x, ids)
        assert set(workers.class_map.experts[1]) == {THEIRS}
    bank = device_backend("cuda-shim", "f16").load({e: model.weights(1, e) for e in range(model.experts)})
    for row in range(len(x)):
        pairs = np.array([(row, expert) for expert in ids[row]], np.int32)
        assert rows[row].tobytes() == bank.rows(x, pairs).tobytes()


def test_a_model_s_experts_in_f16_and_the_rest_in_f32(shim_command: list[str]) -> None:
    model = load(DEMO, backend="native")
    plain = Engine(model, model.local_experts, context=64)
    expected = plain.extend(plain.new_sequence(), TOKENS, want_all=True)
    with one_worker(model, shim_command) as workers:
        engine = Engine(model, workers, context=64)
        ours = engine.extend(engine.new_sequence(), TOKENS, want_all=True)
        assert workers.class_map.own == workers.class_map.dense == OWN
        assert {kind for kinds in workers.class_map.experts.values() for kind in kinds} == {THEIRS}
        parts = [engine.extend(sequence, [t])[0] for sequence in [engine.new_sequence()] for t in TOKENS]
    assert 1e-6 < relative_l2(ours, expected) <= 5e-3
    assert np.array(parts).tobytes() == ours.tobytes()
