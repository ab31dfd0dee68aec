"""A contract that passes everything is worth nothing: kernels with a fault in them, each caught by the level that should."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backbone.discovery import DEMO
from backbone.session import open_session
from backbone.settings import Setting, resolve
from backbone.tolerance.judge import judge
from backbone.tolerance.passage import Passage
from backbone.tolerance.policy import load_policy
from backbone.tolerance.runner import LEVELS, Journal, Work, run
from backbone.tolerance.sides import ModelSide
from backbone.tolerance.specs import open_side
from kernels import reference
from kernels.backends.numpy_cpu import NumpyBackend
from kernels.formats import GGMLType
from kernels.interface import F32, I32, ExpertWeights, Operation
from kernels.interpreter import Functions, Interpreter
from kernels.matrix import Matrix

Matmul = Callable[..., F32]
Found = Mapping[str, Any]


class BadBackend(NumpyBackend):
    """The reference with a fault: another product, or other functions."""

    def __init__(self, *, matmul: Matmul | None = None, **functions: Callable[..., Any]) -> None:
        super().__init__()
        self._matmul = matmul or reference.matmul
        operations = reference.OPERATIONS | {"matmul": self._matmul} | functions
        self._functions = Functions(operations, reference.PREPARED)

    def program(self, operations: Sequence[Operation], slot_widths: Sequence[int]) -> Interpreter:
        return Interpreter(operations, slot_widths, self._functions)

    def load(self, experts: Mapping[int, ExpertWeights]) -> BadBank:  # type: ignore[override]
        return BadBank(experts, self._matmul)


class BadBank:
    """Experts by another product."""

    def __init__(self, experts: Mapping[int, ExpertWeights], matmul: Matmul) -> None:
        self._experts, self._matmul = experts, matmul

    def rows(self, x: F32, pairs: I32) -> F32:
        out = np.empty((len(pairs), self._experts[0].down.rows), np.float32)
        for i, (row, number) in enumerate(pairs.tolist()):
            expert, one = self._experts[number], x[row : row + 1]
            gate, up = self._matmul(one, weight=expert.gate), self._matmul(one, weight=expert.up)
            out[i] = self._matmul(reference.silu(gate) * up, weight=expert.down)
        return out


def with_bytes(change: Callable[[Any], Any]) -> Matmul:
    """A product that reads the bytes of Q4_K blocks (144 each) otherwise."""

    def matmul(x: F32, *, weight: Matrix) -> F32:
        if weight.type is GGMLType.Q4_K:
            blocks = change(weight.data.reshape(-1, 144).copy())
            weight = Matrix.of(weight.type, weight.rows, weight.cols, blocks.reshape(-1))
        return reference.matmul(x, weight=weight)

    return matmul


def swapped_nibbles(blocks: Any) -> Any:
    blocks[:, 16:] = blocks[:, 16:] << 4 | blocks[:, 16:] >> 4
    return blocks


def neighbours_scale(blocks: Any) -> Any:
    """The scales of the first four groups of a block, each taken for the next."""
    blocks[:, 4:8] = np.roll(blocks[:, 4:8], 1, axis=1)
    return blocks


def tf32(values: F32) -> F32:
    """Rounded to the 10 bits of mantissa that a tensor core keeps."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def tf32_matmul(x: F32, *, weight: Matrix) -> F32:
    out = np.empty((len(x), weight.rows), np.float32)
    for part, tile in weight.tiles():
        out[:, part] = tf32(x) @ tf32(tile).T
    return out


def measured(bad: BadBackend, model: Path, tokens: Sequence[int]) -> dict[str, Found]:
    """The levels of a run of the float64 oracle against a backend."""
    settings = resolve(argparse.Namespace(), {})
    settings = settings.but({"model": Setting(str(model), "test"), "workers": Setting("0", "test")})
    with (
        open_side("float64", "--a", settings, context=64) as oracle,
        open_session(settings, backend=bad) as session,
    ):
        side = ModelSide(session, session.engine.experts, {}, numeric_class="bad", precision="f32")
        passage = Passage("ids", "", (tuple(tokens),))
        work = Work(passage=passage, levels=LEVELS, prompts=1, prompt_tokens=8, tokens=8, seed=1)
        findings = run(oracle, side, work, Journal(None, ""), lambda what, done, total: None)
        return judge(findings, LEVELS, load_policy(None), precisions=("f64", "f32"), coarser="f32", is_one_class=False)


TOKENS = tuple(int(i) for i in np.random.default_rng(5).integers(0, 4000, 48))


def failed(levels: Mapping[str, Found]) -> set[str]:
    return {number for number, level in levels.items() if level["pass"] is False}


def test_the_reference_itself_passes() -> None:
    levels = measured(BadBackend(), DEMO, TOKENS)
    assert failed(levels) == set()
    assert all(levels[number]["pass"] for number in "1256")


@pytest.mark.parametrize(
    ("bad", "by"),
    [
        (lambda: BadBackend(matmul=with_bytes(swapped_nibbles)), "123"),
        (lambda: BadBackend(matmul=with_bytes(neighbours_scale)), "123"),
        (lambda: BadBackend(matmul=tf32_matmul), "12"),
    ],
    ids=["nibble-order", "scale", "tf32"],
)
def test_a_wrong_product_is_caught_by_level_1(bad: Callable[[], BadBackend], by: str) -> None:
    levels = measured(bad(), DEMO, TOKENS)
    missed = {bar["name"] for bar in levels["1"]["bars"] if not bar["holds"]}
    assert "b expert_relative_l2" in missed
    assert "b operation_relative_l2" in missed
    assert "a expert_relative_l2" not in missed
    assert failed(levels) >= set(by)


def test_an_unnormalised_top_k_is_caught_by_drift_and_logits() -> None:
    levels = measured(BadBackend(normalize=lambda weights: weights), DEMO, TOKENS)
    assert levels["1"]["pass"]  # no operation is wrong
    assert failed(levels) >= {"2", "3"}


def test_the_other_rope_is_caught_by_drift_and_logits() -> None:
    levels = measured(BadBackend(rope=reference.rope_pairs), DEMO, TOKENS)
    assert levels["1"]["pass"]
    assert failed(levels) >= {"2", "3"}
    drift = [each["mean"] for each in levels["2"]["found"]["layers"]]
    assert drift[0] > 1e-3  # from the first layer on


def test_gelu_in_place_of_gelu_tanh_is_caught_by_level_1(f32_models: Path) -> None:
    gemma = f32_models / "gemma3.gguf"
    tokens = tuple(int(i) for i in np.random.default_rng(5).integers(0, 64, 24))
    assert measured(BadBackend(), gemma, tokens)["1"]["pass"]
    levels = measured(BadBackend(gelu_tanh=reference.gelu), gemma, tokens)
    missed = {bar["name"] for bar in levels["1"]["bars"] if not bar["holds"]}
    assert missed == {"b operation_relative_l2"}
    case = next(case for case in levels["1"]["found"]["cases"] if case["case"] == "gelu_tanh")
    assert case["b"]["256"]["worst"] > 1e-5
    assert failed(levels) >= {"1", "2"}
