"""Attention: accuracy against float64, bits against an emulation of the canonical order, and that nothing else decides.

Legend: T rows, H heads, K kv heads, D head width, P keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

import canonical
import numpy as np
import pytest
from attention_kit import CASES, Case, program_of
from native_kit import F32, FUNCTIONS, bound, compiled, given, mapped, native, rows_of, run, same_bits

from kernels.interface import Operation, Program
from kernels.state import Rows, Sequence


def in_parts(operations: Seq[Operation], program: Program, parts: Seq[int], sequence: Sequence | None = None) -> F32:
    """Rows in batches of these sizes, one after the other."""
    sequence = sequence or program.sequence()
    outs, at = list[F32](), 0
    for size in parts:
        outs.append(run(program, operations, rows_of(size, sequence, first=at), 3))
        at += size
    return np.concatenate(outs)


def exact(case: Case, q: F32, k: F32, v: F32, sinks: F32 | None) -> Any:
    """All rows in float64, [T, H * Dv]."""
    count, group = len(q), case.heads // case.kv_heads
    qs, ks, vs = (
        x.astype(np.float64).reshape(count, n, -1)
        for x, n in zip((q, k, v), (case.heads, case.kv_heads, case.kv_heads), strict=True)
    )
    position = np.arange(count)
    seen = position[None] <= position[:, None]
    if case.window:
        seen &= position[None] > position[:, None] - case.window
    out = []
    for h in range(case.heads):
        scores = qs[:, h] @ ks[:, h // group].T * case.factor
        scores = case.softcap * np.tanh(scores / case.softcap) if case.softcap else scores
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        e = np.exp(scores - top)
        total = e.sum(axis=1, keepdims=True) + (np.exp(sinks[h] - top) if sinks is not None else 0)
        out.append(e / total @ vs[:, h // group])
    return np.stack(out, axis=1).reshape(count, -1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64_and_decode_is_prefill(case: Case) -> None:
    operations, program, inputs = program_of(case)
    together = in_parts(operations, program, [case.keys])
    expected = exact(case, *inputs)
    assert (np.abs(together - expected).max(axis=1) <= 2e-6 * np.abs(expected).max(axis=1).clip(0.1)).all()
    tail = min(case.keys, 5)
    few = [n for n in (case.keys - tail - (case.keys - tail) // 3, (case.keys - tail) // 3, *[1] * tail) if n]
    same_bits(in_parts(operations, program, few), together)
    alone, one_thread, _ = program_of(case, native(1))
    same_bits(in_parts(alone, one_thread, [case.keys]), together)


@pytest.mark.parametrize("case", [Case(keys=300, width=16), Case(keys=290, width=16, window=40, sinks=True)], ids=str)
def test_token_by_token(case: Case) -> None:
    operations, program, _ = program_of(case, native(1))
    together = in_parts(operations, program, [case.keys])
    same_bits(in_parts(operations, program, [1] * case.keys), together)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Our exp and tanh."""
    return compiled(FUNCTIONS, tmp_path_factory.mktemp("functions"))


def emulated(case: Case, row: int, head: int, q: F32, k: F32, v: F32, sinks: F32 | None, library: ctypes.CDLL) -> F32:
    """One row's head in the canonical order, with no block of rows and no tile anywhere."""
    g = head // (case.heads // case.kv_heads)
    width, value_width = case.width, v.shape[1] // case.kv_heads
    first = max(0, row + 1 - case.window) if case.window else 0
    keys, values = k[:, g * width : (g + 1) * width], v[:, g * value_width : (g + 1) * value_width]
    scores = canonical.products(keys[: row + 1], q[row : row + 1, head * width : (head + 1) * width])[0]
    scores = scores * np.float32(case.factor)
    if case.softcap:
        cap = np.float32(case.softcap)
        scores = cap * mapped(library, "tanh_of", scores / cap)
    top = scores[first:].max()
    if sinks is not None:
        top = max(top, sinks[head])
    e = mapped(library, "exp_of", scores - top)
    e[:first] = 0
    total = canonical.total(e)
    if sinks is not None:
        total = total + mapped(library, "exp_of", np.array([sinks[head] - top]))[0]
    whole: F32 | None = None
    for start in range(0, row + 1, 256):
        block, stop = np.zeros(value_width, np.float32), min(start + 256, row + 1)
        if stop <= first:
            continue
        for p in range(max(start, first), stop):
            block = canonical.fma(np.full(value_width, e[p]), values[p], block)
        whole = block if whole is None else whole + block
    assert whole is not None
    return whole / total


@pytest.mark.parametrize(
    "case",
    [
        Case(keys=700, width=40),
        Case(keys=700, width=64, value_width=20, window=300),
        Case(keys=530, width=32, window=1, sinks=True),
        Case(keys=600, width=32, heads=13, kv_heads=1, window=260, sinks=True, softcap=5.0),
    ],
    ids=str,
)
def test_bits_of_the_canonical_order(case: Case, library: ctypes.CDLL) -> None:
    operations, program, inputs = program_of(case)
    ours = in_parts(operations, program, [case.keys - 1, 1]).reshape(case.keys, case.heads, -1)
    for row in (0, 31, 32, 255, 256, 257, 511, 512, case.keys - 1):
        for head in {0, case.heads // 2, case.heads - 1}:
            same_bits(ours[row, head], emulated(case, row, head, *inputs, library))


def mixed(sequences: Seq[Sequence], order: Seq[int], next_position: list[int], count: int) -> Rows:
    """Rows of several sequences in this order; a row's token is its sequence's turn of the embeddings."""
    positions = []
    for i in order:
        positions.append(next_position[i])
        next_position[i] += 1
    tokens = [i * count + p for i, p in zip(order, positions, strict=True)]
    return Rows(
        np.array(tokens, np.int32),
        np.array(positions, np.int64),
        [sequences[i] for i in order],
        np.arange(len(order)),
    )


@pytest.mark.parametrize("window", [0, 20])
def test_sequences_in_one_batch_do_not_see_each_other(window: int) -> None:
    count, random = 60, np.random.default_rng(7)
    case = Case(keys=3 * count, width=32, window=window)
    operations, program, _ = program_of(case, native(3))
    alone = []
    for i in range(3):
        sequence = program.sequence()
        rows = rows_of(count, sequence, tokens=range(i * count, (i + 1) * count))
        alone.append(run(program, operations, rows, 3))
    # A prompt beside single steps, then steps of all in turn, then whatever order.
    plans = [
        [0] * 30 + [1] + [2] * 7,
        [0, 1, 2] * 5,
        list(random.permutation([0] * 15 + [1] * 20 + [2] * 9)),
        [1, 1, 0],
    ]
    sequences, at = [program.sequence() for _ in range(3)], [0, 0, 0]
    outs: list[list[F32]] = [[], [], []]
    for order in plans:
        for i, row in zip(order, run(program, operations, mixed(sequences, order, at, count), 3), strict=True):
            outs[i].append(row)
    for i in range(3):
        same_bits(np.stack(outs[i]), alone[i][: at[i]])


def test_a_sequence_that_is_cut_back_and_goes_on() -> None:
    case = Case(keys=520, width=32)
    operations, program, _ = program_of(case)
    together = in_parts(operations, program, [520])
    sequence = program.sequence()
    in_parts(operations, program, [300], sequence)
    sequence.truncate(250)  # the 50 keys behind are there, and must not be seen
    first = run(program, operations, rows_of(6, sequence, first=250), 3)
    same_bits(first, together[250:256])
    same_bits(run(program, operations, rows_of(264, sequence, first=256), 3), together[256:])


def test_positions_must_follow_each_other() -> None:
    operations, program, _ = program_of(Case(keys=30, width=32))
    sequence = program.sequence()
    with pytest.raises(ValueError, match="position 3 does not follow the 0 that are cached"):
        run(program, operations, rows_of(2, sequence, first=3), 3)
    gap = Rows(np.zeros(2, np.int32), np.array([0, 2]), [sequence] * 2, np.arange(2))
    with pytest.raises(ValueError, match="in order of position, without a gap"):
        run(program, operations, gap, 3)


def test_keys_that_are_not_finite_are_no_crash_and_stay_with_those_who_see_them() -> None:
    case = Case(keys=40, width=32, window=8)
    operations, program, (_, k, v, _) = program_of(case)
    clean = in_parts(operations, program, [40])
    k[20, 3], v[20, 40] = np.nan, np.inf
    operations[1], operations[2] = given(1, k), given(2, v)
    ours = in_parts(operations, bound(operations, native(2)), [40])
    untouched = [*range(20), *range(28, 40)]
    same_bits(ours[untouched], clean[untouched])
    assert not np.isfinite(ours[20:28]).all()
