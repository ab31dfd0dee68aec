"""The same bits with narrower registers or none, in both classes: products, attention of many shapes, experts, models.

What `test_same_bits` covers with more builds for the F32 class is here for `i16` and as Python calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attention_kit import CASES, Case, program_of
from goldens import Golden
from native_kit import (
    F32,
    VARIANTS,
    absent_variant,
    given,
    native,
    native_variant,
    operation,
    result,
    rows_of,
    run,
    same_bits,
    weights,
)

from archdefs import load_library
from backbone.engine import Engine
from backbone.model import load_model
from kernels.backends.native_cpu import NativeBackend
from kernels.formats import FORMATS, GGMLType
from kernels.interface import ExpertWeights

Find = Callable[[str], Path]
CLASSES = ("f32", "i16")


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, compiled_kernels: Path) -> str:
    """Its name; skipped with the reason where it cannot be had."""
    name: str = request.param
    if reason := absent_variant(name):
        pytest.skip(reason)
    return name


def test_it_is_what_it_says(variant: str) -> None:
    assert native_variant(variant).variant == variant
    assert native_variant(variant).numeric_class == native().numeric_class


@pytest.mark.parametrize("activations", CLASSES)
@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_products(variant: str, type_: GGMLType, activations: str) -> None:
    random = np.random.default_rng(int(type_))
    for cols in (512, *((96,) if FORMATS[type_].block <= 32 else ()), *((100,) if FORMATS[type_].block == 1 else ())):
        matrix = weights(type_, 61, cols, random)
        x = (random.standard_normal((256, cols)) * 2.0 ** random.integers(-9, 9, (256, 1))).astype(np.float32)
        for width in (1, 2, 8, 9, 64, 256):
            operations = [given(0, x[:width]), operation("matmul", (0,), (1,), weight=matrix)]
            one, other = (
                result(operations, width, 1, backend)
                for backend in (native(1, activations), native_variant(variant, 2, activations))
            )
            same_bits(other, one)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(variant: str, case: Case) -> None:
    outs = list[F32]()
    for backend in (native(1), native_variant(variant, 2)):
        operations, program, _ = program_of(case, backend)
        sequence = program.sequence()
        parts = [rows_of(case.keys - 1, sequence)] if case.keys > 1 else []
        parts.append(rows_of(1, sequence, first=case.keys - 1))
        outs.append(np.concatenate([run(program, operations, rows, 3) for rows in parts]))
    same_bits(outs[1], outs[0])


@pytest.mark.parametrize("activations", CLASSES)
@pytest.mark.parametrize("word", ["silu", "gelu", "gelu_tanh", "relu"])
def test_experts(variant: str, word: str, activations: str) -> None:
    random = np.random.default_rng(2)
    held = {
        e: ExpertWeights(
            gate=weights(GGMLType.Q4_K, 512, 256, random),
            up=weights(GGMLType.Q6_K, 512, 256, random),
            down=weights(GGMLType.Q8_0, 256, 512, random),
            activation=word,
            up_bias=random.standard_normal(512).astype(np.float32),
        )
        for e in range(4)
    }
    x = random.standard_normal((70, 256)).astype(np.float32)
    pairs = np.stack([np.arange(70), random.integers(0, 4, 70)], axis=1).astype(np.int32)
    for call in (pairs, pairs[:1], pairs[:3]):
        one, other = (
            backend.load(held).rows(x, call)
            for backend in (native(1, activations), native_variant(variant, 2, activations))
        )
        same_bits(other, one)


@pytest.mark.parametrize("activations", CLASSES)
@pytest.mark.parametrize("name", ["qwen3moe-k256-Q4_K_M", "qwen2moe", "gemma3"])
def test_logits_of_whole_models(variant: str, name: str, activations: str, arch_model: Find) -> None:
    tokens = Golden(name if name != "qwen3moe-k256-Q4_K_M" else f"{name}-deq").data()["tokens"].tolist()

    def logits(backend: NativeBackend) -> bytes:
        model = load_model(arch_model(name), load_library(), backend)
        engine = Engine(model, model.local_experts, context=128, chunk_rows=20)
        return engine.extend(engine.new_sequence(), tokens, want_all=True).tobytes()

    assert logits(native_variant(variant, 2, activations)) == logits(native(1, activations))
