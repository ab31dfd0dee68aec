"""One model, end to end, on every variant that this machine runs: the same bits; and blocks against their specification.

The logits' digests are committed too, so that the variants of one kind of machine are held to those of another.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from goldens import F32_BAR, Golden
from native_builds import BUILDS, EXPECTED, Build, digests

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
WANTED = ("gcc avx512", "gcc avx2", "gcc plain", "aarch64 neon", "aarch64 plain")
VARIANTS = [b for b in BUILDS if b.name in WANTED and not b.is_foreign]
NAMES = ("qwen3moe", "qwen3moe-k256-Q4_K_M")
ALONE = 40  #: tokens of the prompt; the rest come one at a time


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda b: b.name)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    build: Build = request.param
    if reason := build.lacks():
        pytest.skip(reason)
    library = build.library(tmp_path_factory.mktemp("library"))
    assert library.swarm_variant().decode() == build.variant
    return library


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", [1, 3])
def test_prefill_and_decode_give_the_committed_bits(
    name: str, threads: int, library: ctypes.CDLL, arch_model: Callable[[str], Path]
) -> None:
    model = load_model(arch_model(name), load_library(), NativeBackend(Options(threads=threads), library))
    engine = Engine(model, model.local_experts, context=128)
    golden = Golden(f"{name}-deq" if "-Q" in name else name).data()
    tokens = golden["tokens"].tolist()
    sequence = engine.new_sequence()
    logits = [np.array(engine.extend(sequence, tokens[:ALONE], want_all=True))]
    logits += [np.array(engine.step(sequence, token))[None] for token in tokens[ALONE:]]
    together = np.concatenate(logits)
    assert np.abs(together - golden["logits"]).max() <= F32_BAR
    committed = digests((EXPECTED / "logits.txt").read_text())
    assert hashlib.sha256(together.astype("<f4").tobytes()).hexdigest() == committed.get(name)


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
