"""`--activations i16` and `--kv-cache f16` from end to end on the demo model: bits, and how far they are from F32's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from goldens import Elsewhere, relative_l2
from shared_data import GOLDEN
from swarm_kit import NEVER_S

from archdefs import load_library
from backbone.discovery import DEMO
from backbone.engine import Engine
from backbone.experts import ExpertSource
from backbone.local_workers import WorkerSpec
from backbone.model import Model, load_model
from backbone.swarm import Swarm
from kernels.interface import F32, Options
from kernels.registry import make_backend

PROMPT = json.loads((GOLDEN / "verse-moe-golden.json").read_text())["prompts"][0]
TOKENS = [*PROMPT["prompt_ids"], *PROMPT["ids"]][:40]
CLASSES = [("i16", "f32"), ("f32", "f16"), ("i16", "f16")]
BAR = 1e-3  #: relative L2 distance of logits from those of the F32 class


def demo(activations: str, kv_cache: str, threads: int = 2) -> Model:
    options = Options(threads=threads, activations=activations, kv_cache=kv_cache)
    return load_model(DEMO, load_library(), make_backend("native", options))


def logits(model: Model, experts: ExpertSource | None = None, chunk_rows: int = 512) -> F32:
    engine = Engine(model, experts or model.local_experts, context=64, chunk_rows=chunk_rows)
    return engine.extend(engine.new_sequence(), TOKENS, want_all=True)


@pytest.fixture(scope="module", params=CLASSES, ids="-".join)
def asked(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Dtypes of activations, and of keys and values."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def model(asked: tuple[str, str]) -> Model:
    return demo(*asked)


@pytest.fixture(scope="module")
def expected(model: Model) -> bytes:
    """The bits of one process, one batch."""
    return logits(model).tobytes()


@pytest.fixture(scope="module")
def plain() -> F32:
    """Logits of the F32 class."""
    return logits(demo("f32", "f32"))


def test_logits_are_near_those_of_f32_and_not_the_same(model: Model, expected: bytes, plain: F32) -> None:
    ours = np.frombuffer(expected, np.float32).reshape(plain.shape)
    assert 0 < relative_l2(ours, plain) <= BAR
    assert (np.abs(ours.argmax(axis=1) - plain.argmax(axis=1)) > 0).sum() <= 1  # near ties


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_batches_of_any_size(model: Model, expected: bytes, chunk: int) -> None:
    assert logits(model, chunk_rows=chunk).tobytes() == expected


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_program_that_is_left_for_its_experts(model: Model, expected: bytes, chunk: int) -> None:
    elsewhere = Elsewhere(model.local_experts)
    assert logits(model, elsewhere, chunk).tobytes() == expected
    assert elsewhere.asked == set(model.expert_tensors)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(asked: tuple[str, str], expected: bytes, threads: int) -> None:
    assert logits(demo(*asked, threads), chunk_rows=9).tobytes() == expected


def test_two_workers_of_the_same_class(model: Model, expected: bytes) -> None:
    ours = model.backend.numeric_class
    specs = [WorkerSpec(backend="native", threads=1 + i, activations=ours.activations) for i in range(2)]
    with Swarm(model, specs, local=model.local_experts, share_path=False, hedge_s=NEVER_S) as workers:
        assert {kind for kinds in workers.class_map.experts.values() for kind in kinds} == {str(ours)}
        for chunk in (1, 7, 64):
            assert logits(model, workers, chunk).tobytes() == expected
        assert all(report.calls > 0 and report.state == "serving" for report in workers.report())
        assert workers.local_calls == 0
