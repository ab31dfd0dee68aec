"""Models, end to end, on every variant that this machine runs: the same bits; and blocks against their specification.

The logits' digests are committed too, so that the variants of one kind of machine are held to those of another.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from goldens import F32_BAR, GELU_TABLE_BAR, Golden, relative_l2
from native_builds import BUILDS, EXPECTED, Build, Workshop, digests

from archdefs import load_library
from backbone.engine import Engine
from backbone.model import load_model
from kernels.backends.native_cpu import NativeBackend
from kernels.formats import FORMATS, GGMLType
from kernels.interface import Options
from kernels.matrix import Matrix
from kernels.native.structs import CMatrix
from kernels.quants import dequantise

#: One of each variant that this kind of machine runs. What is emulated has no Python: the driver covers it.
WANTED = ("gcc avx512 vnni", "gcc avx512 -O2", "gcc avx2", "gcc plain -O2", "aarch64 neon dotprod", "aarch64 plain")
VARIANTS = [b for b in BUILDS if b.name in WANTED and not b.is_foreign]
ALONE = 40  #: tokens of the prompt; the rest come one at a time


@dataclass(frozen=True)
class Run:
    """A golden model in a class."""

    model: str
    threads: int = 1
    activations: str = "f32"
    kv_cache: str = "f32"

    @property
    def name(self) -> str:
        """Of its line in logits.txt."""
        cache = "" if self.kv_cache == "f32" else f" kv-{self.kv_cache}"
        return self.model + ("" if self.activations == "f32" else f" {self.activations}") + cache

    def __str__(self) -> str:
        return f"{self.name} {self.threads}"


K_QUANTS = "qwen3moe-k256-Q4_K_M"
RUNS = [
    *(Run(model, threads) for model in ("qwen3moe", K_QUANTS) for threads in (1, 3)),
    *(Run(model, 2) for model in ("qwen2moe", "gemma3")),
    *(Run(K_QUANTS, threads, "i16") for threads in (1, 3)),
    Run("qwen3moe-Q8_0", 2, "i16"),
    Run(K_QUANTS, 2, "f32", "f16"),
    Run(K_QUANTS, 3, "i16", "f16"),
]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda b: b.name)
def library(request: pytest.FixtureRequest, workshop: Workshop) -> ctypes.CDLL:
    build: Build = request.param
    if reason := build.lacks():
        pytest.skip(reason)
    library = workshop[build].result().load()
    assert library.swarm_variant().decode() == build.variant
    return library


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_prefill_and_decode_give_the_committed_bits(
    run: Run, library: ctypes.CDLL, arch_model: Callable[[str], Path]
) -> None:
    options = Options(threads=run.threads, activations=run.activations, kv_cache=run.kv_cache)
    model = load_model(arch_model(run.model), load_library(), NativeBackend(options, library))
    engine = Engine(model, model.local_experts, context=128)
    golden = Golden(f"{run.model}-deq" if "-Q" in run.model else run.model).data()
    tokens = golden["tokens"].tolist()
    sequence = engine.new_sequence()
    logits = [np.array(engine.extend(sequence, tokens[:ALONE], want_all=True))]
    logits += [np.array(engine.step(sequence, token))[None] for token in tokens[ALONE:]]
    together = np.concatenate(logits)
    if run.name == run.model:
        bar = GELU_TABLE_BAR if run.model == "gemma3" else F32_BAR
        assert np.abs(together - golden["logits"]).max() <= bar
    else:
        assert relative_l2(together, golden["logits"]) <= 1e-3
    committed = digests((EXPECTED / "logits.txt").read_text())
    assert hashlib.sha256(together.astype("<f4").tobytes()).hexdigest() == committed.get(run.name)


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_blocks_of_random_bytes(type_: GGMLType, library: ctypes.CDLL) -> None:
    # Random bytes hold every kind of scale: subnormal, infinite, not a number.
    form = FORMATS[type_]
    cols, rows = max(form.block, 32) * 4, 60
    data = np.random.default_rng(7).integers(0, 256, (rows, cols // form.block * form.nbytes), np.uint8)
    matrix, ours = Matrix(type_, rows, cols, data), np.empty((rows, cols), np.float32)
    library.swarm_dequantise(ctypes.byref(CMatrix.of(matrix)), ours.ctypes.data)
    with np.errstate(all="ignore"):
        theirs = dequantise(type_, data)
    differ = (ours.view(np.uint32) != theirs.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(theirs))
    assert not differ.any(), f"{differ.sum()} of {differ.size} differ, first at {np.argwhere(differ)[0]}"
