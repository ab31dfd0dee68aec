"""Real models against llama.cpp's text on the same weights in F32. Marked: they are fetched, and take minutes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from goldens import load
from real_models import SMOL_EXPERTS_SHA256, _sha256, real_model
from shared_data import GOLDEN

from backbone.engine import Engine, GenerateOptions
from backbone.local_workers import WorkerSpec
from backbone.swarm import Swarm
from backbone.tokenizer import load_tokenizer

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(1800)]
GEMMA_MARGIN = 0.02  #: llama.cpp's half-precision GELU moves log-probabilities by as much


def prompts(name: str) -> list[Any]:
    return [
        pytest.param(prompt, id=prompt["name"])
        for prompt in json.loads((GOLDEN / "generate" / f"{name}.json").read_text())["prompts"]
    ]


def certain(prompt: dict[str, Any], margin: float) -> int:
    """How many of the first tokens were chosen by at least this margin, as far as positions were recorded."""
    for at, position in zip(prompt["position_index"], prompt["positions"], strict=True):
        (_, first), (_, second) = position["top5"][:2]
        if first - second < margin:
            return int(at)
    return len(prompt["ids"])


def generated(engine: Engine, prompt: dict[str, Any], source: str) -> Any:
    tokenizer = load_tokenizer(engine.model.gguf.metadata, source)
    assert tokenizer.encode(prompt["prompt"]) == prompt["prompt_ids"]
    return engine.generate(prompt["prompt_ids"], tokenizer, GenerateOptions(max_tokens=len(prompt["ids"])))


@pytest.mark.parametrize("prompt", prompts("smollm2"))
def test_smollm2(prompt: dict[str, Any]) -> None:
    model = load(real_model("smollm2"))
    answer = generated(Engine(model, model.local_experts, context=512), prompt, "smollm2")
    assert answer.ids == prompt["ids"]
    assert answer.text == prompt["text"]


@pytest.mark.parametrize("prompt", prompts("gemma3"))
def test_gemma3(prompt: dict[str, Any]) -> None:
    model = load(real_model("gemma3"))
    sure = certain(prompt, GEMMA_MARGIN)
    assert sure > 0
    answer = generated(Engine(model, model.local_experts, context=512), prompt, "gemma3")
    assert answer.ids[:sure] == prompt["ids"][:sure]


@pytest.mark.parametrize("prompt", prompts("smollm2"))
def test_smollm2_as_experts_through_two_workers(prompt: dict[str, Any]) -> None:
    path = real_model("smol-experts")
    assert _sha256(path) == SMOL_EXPERTS_SHA256
    model = load(path)
    with Swarm(model, [WorkerSpec(backend="numpy")] * 2, local=model.local_experts) as swarm:
        answer = generated(Engine(model, swarm, context=512), prompt, "smol-experts")
        assert answer.ids == prompt["ids"]
        assert all(report.calls > 0 for report in swarm.report())
        assert swarm.local_calls == 0
