"""Every family against llama.cpp's own numbers, and that no family's name decides anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_kit import needs_opencl
from goldens import ARCHS, F32_BAR, GELU_TABLE_BAR, LATER, Elsewhere, Golden, golden_params, load, renamed
from shared_data import GOLDEN

from archdefs import load_library
from backbone.discovery import DEMO
from backbone.engine import Engine, GenerateOptions
from backbone.model import Model
from backbone.tokenizer import load_tokenizer
from kernels.state import Taps

Find = Callable[[str], Path]
BACKENDS = ("numpy", "native", pytest.param("opencl", marks=needs_opencl()))
PROMPTS = json.loads((GOLDEN / "verse-moe-golden.json").read_text())["prompts"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("golden", golden_params())
def test_logits_experts_and_greedy_tokens(golden: Golden, backend: str, arch_model: Find) -> None:
    data = golden.data()
    bar = GELU_TABLE_BAR if str(data["tolerance"]) == "f32-gelu-table" else F32_BAR
    model = load(arch_model(golden.model_name), backend=backend)
    engine = Engine(model, model.local_experts, context=128)
    sequence, taps = engine.new_sequence(), Taps()
    logits = engine.extend(sequence, data["tokens"].tolist(), want_all=True, taps=taps)
    assert np.abs(logits - data["logits"]).max() <= bar

    for at, layer in enumerate(data["moe_layers"].tolist() if "moe_layers" in data else []):
        ours = np.sort(np.concatenate(taps.ids[layer]), axis=1)
        assert np.array_equal(ours, np.sort(data["experts"][at], axis=1)), f"experts of layer {layer}"

    greedy, row = [], logits[-1]
    for theirs in [*data["greedy_logits"], None]:
        greedy.append(int(row.argmax()))
        if theirs is not None:
            row = engine.step(sequence, greedy[-1])
            assert np.abs(row - theirs).max() <= bar
    assert greedy == data["greedy"].tolist()


@pytest.mark.parametrize("activations", ["f32", "i16"])
@pytest.mark.parametrize("golden", golden_params())
def test_native_bits_depend_on_nothing_but_the_tokens(golden: Golden, activations: str, arch_model: Find) -> None:
    """Threads, batches, taps, and whether a program runs in one piece or is left for its experts."""
    tokens = golden.data()["tokens"].tolist()
    path, library = arch_model(golden.model_name), load_library()
    one, two, three = (load(path, library, "native", threads, activations) for threads in (1, 2, 3))

    def bits(model: Model, chunk_rows: int = 512, *, leave: bool = False, taps: Taps | None = None) -> bytes:
        elsewhere = Elsewhere(model.local_experts)
        engine = Engine(model, elsewhere if leave else model.local_experts, context=128, chunk_rows=chunk_rows)
        logits = engine.extend(engine.new_sequence(), tokens, want_all=True, taps=taps)
        assert elsewhere.asked == (set(model.expert_tensors) if leave else set())
        return logits.tobytes()

    expected = bits(one)
    taps = [Taps(), Taps()]
    assert bits(two) == expected
    assert bits(three) == expected
    assert bits(one, 7) == expected
    assert bits(two, 7) == expected
    assert bits(two, 1) == expected
    assert bits(one, taps=taps[0]) == expected
    assert bits(two, 7, taps=taps[1]) == expected
    for layer, residuals in taps[0].residuals.items():
        assert np.concatenate(residuals).tobytes() == np.concatenate(taps[1].residuals[layer]).tobytes()
    if one.expert_tensors:
        assert bits(one, leave=True) == expected
        assert bits(two, 7, leave=True) == expected
        assert bits(two, 1, leave=True) == expected


@needs_opencl()
@pytest.mark.parametrize("golden", golden_params())
def test_a_dense_path_on_opencl_has_natives_bits(golden: Golden, arch_model: Find) -> None:
    """Prefill at once and in chunks, decode, experts on the device and elsewhere."""
    tokens, path = golden.data()["tokens"].tolist(), arch_model(golden.model_name)
    native, device = load(path, backend="native"), load(path, backend="opencl")
    expected = Engine(native, native.local_experts, context=128)
    whole = expected.extend(expected.new_sequence(), tokens, want_all=True).tobytes()
    for chunk_rows in (512, 7):
        for experts in (device.local_experts, Elsewhere(device.local_experts)):
            engine = Engine(device, experts, context=128, chunk_rows=chunk_rows)
            assert engine.extend(engine.new_sequence(), tokens, want_all=True).tobytes() == whole
    sequences = expected.new_sequence(), engine.new_sequence()
    for token in tokens[:12]:
        assert expected.step(sequences[0], token).tobytes() == engine.step(sequences[1], token).tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_residuals_after_each_layer(backend: str, arch_model: Find) -> None:
    data = Golden("qwen2moe").data()
    model = load(arch_model("qwen2moe"), backend=backend)
    for experts in (model.local_experts, Elsewhere(model.local_experts)):
        engine, taps = Engine(model, experts, context=128), Taps()
        engine.extend(engine.new_sequence(), data["tokens"].tolist(), taps=taps)
        ours = np.stack([np.concatenate(taps.residuals[layer]) for layer in range(len(data["layer_out"]))])
        assert np.abs(ours - data["layer_out"]).max() <= F32_BAR


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "olmoe"])
def test_taps_of_native_are_those_of_the_reference(name: str, arch_model: Find) -> None:
    found = list[Taps]()
    for backend in ("numpy", "native"):
        model, taps = load(arch_model(name), backend=backend), Taps()
        engine = Engine(model, model.local_experts, context=128, chunk_rows=5)
        engine.extend(engine.new_sequence(), Golden(name).data()["tokens"].tolist(), taps=taps)
        found.append(taps)
    reference, native = found
    assert reference.ids.keys() == native.ids.keys()
    for layer, ids in reference.ids.items():
        assert np.array_equal(np.concatenate(ids), np.concatenate(native.ids[layer]))
        scores = np.concatenate(reference.scores[layer])
        assert np.abs(scores - np.concatenate(native.scores[layer])).max() <= 1e-5 * np.abs(scores).max()
        residuals = np.concatenate(reference.residuals[layer])
        difference = np.abs(residuals - np.concatenate(native.residuals[layer])).max()
        assert difference <= 1e-5 * np.abs(residuals).max()


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_given_ids_take_the_place_of_the_routers_choice(backend: str, leave: bool, arch_model: Find) -> None:
    data = Golden("qwen3moe").data()
    model = load(arch_model("qwen3moe"), backend=backend)
    experts = Elsewhere(model.local_experts) if leave else model.local_experts
    engine, taps = Engine(model, experts, context=128, chunk_rows=3), Taps()
    tokens = data["tokens"][:8].tolist()
    free = engine.extend(engine.new_sequence(), tokens, want_all=True, taps=taps)
    own = {layer: np.concatenate(ids) for layer, ids in taps.ids.items()}
    assert np.array_equal(engine.extend(engine.new_sequence(), tokens, want_all=True, given_ids=own), free)
    other, seen = {layer: (ids + 1) % model.expert_count(layer) for layer, ids in own.items()}, Taps()
    moved = engine.extend(engine.new_sequence(), tokens, want_all=True, given_ids=other, taps=seen)
    assert not np.array_equal(moved, free)
    assert all(np.array_equal(np.concatenate(seen.ids[layer]), ids) for layer, ids in other.items())
    # One layer's ids alone, and none of that is left for the next run.
    last = max(own)
    assert not np.array_equal(
        engine.extend(engine.new_sequence(), tokens, want_all=True, given_ids={last: other[last]}), free
    )
    assert np.array_equal(engine.extend(engine.new_sequence(), tokens, want_all=True, given_ids={0: own[0]}), free)
    assert np.array_equal(engine.extend(engine.new_sequence(), tokens, want_all=True), free)


NAMES = sorted({Golden(path.stem).model_name for path in ARCHS.glob("*.npz")})


@pytest.mark.parametrize("name", [n for n in NAMES if Golden(n).family not in LATER and not Golden(n).is_quantised])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_family_name_decides_anything(backend: str, name: str, arch_model: Find, tmp_path: Path) -> None:
    tokens = Golden(name).data()["tokens"].tolist()
    path, library = renamed(arch_model(name), "zwumf", tmp_path)
    logits = []
    for model in (load(arch_model(name), backend=backend), load(path, library, backend)):
        engine = Engine(model, model.local_experts, context=128)
        logits.append(engine.extend(engine.new_sequence(), tokens, want_all=True))
    assert logits[0].tobytes() == logits[1].tobytes()
    assert load(path, library).definition.origin != "built in"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p["name"])
def test_demo_model_writes_what_llama_cpp_writes(prompt: dict[str, Any], backend: str) -> None:
    model = load(DEMO, backend=backend)
    tokenizer = load_tokenizer(model.gguf.metadata, "demo")
    ids = tokenizer.encode(prompt["prompt"]) if isinstance(prompt["prompt"], str) else prompt["prompt"]
    assert ids == prompt["prompt_ids"]
    engine = Engine(model, model.local_experts, context=512)
    shown: list[str] = []
    answer = engine.generate(ids, tokenizer, GenerateOptions(max_tokens=len(prompt["ids"])), on_text=shown.append)
    assert (answer.ids, answer.text, answer.stop) == (prompt["ids"], prompt["text"], prompt["stop"])
    assert "".join(shown) == prompt["text"]


def test_every_definition_has_a_golden_that_runs() -> None:
    families = {param.values[0].family for param in golden_params() if not param.marks}
    assert {"mixtral", "llama31"} <= families
    assert set(load_library().definitions) <= families
