"""Expert rows: bits that depend on the row and the expert alone, accuracy, the choice of experts, what is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from native_kit import F32, bound, given, native, operation, result, rows_of, run, same_bits, weights

from kernels import reference
from kernels.combine import combine
from kernels.errors import KernelError, NotFinite
from kernels.formats import GGMLType
from kernels.interface import ExpertWeights, Operation
from kernels.interpreter import Interpreter
from kernels.quants import dequantise
from kernels.state import Rows

WORDS = sorted(reference.ACTIVATIONS)
SHAPES = [(256, 512, GGMLType.Q4_K), (96, 640, GGMLType.Q8_0), (40, 72, GGMLType.F16), (64, 33, GGMLType.F32)]


def experts(
    width: int, hidden: int, type_: GGMLType, *, count: int = 5, word: str = "silu", biases: bool = False, seed: int = 0
) -> dict[int, ExpertWeights]:
    """So many experts; a down matrix whose rows are no whole blocks is of F32."""
    random = np.random.default_rng(seed)
    down = type_ if type_ is not GGMLType.Q4_K or hidden % 256 == 0 else GGMLType.F32

    def bias(n: int) -> F32 | None:
        return random.standard_normal(n).astype(np.float32) if biases else None

    return {
        e: ExpertWeights(
            gate=weights(type_, hidden, width, random),
            up=weights(type_, hidden, width, random),
            down=weights(down, width, hidden, random),
            activation=word,
            gate_bias=bias(hidden),
            up_bias=bias(hidden),
            down_bias=bias(width),
        )
        for e in range(count)
    }


def activations(width: int, rows: int = 20) -> F32:
    return np.random.default_rng(width).standard_normal((rows, width)).astype(np.float32)


def pairs_of(*pairs: tuple[int, int]) -> Any:
    return np.array(pairs, np.int32).reshape(-1, 2)


def by_steps(e: ExpertWeights, x: F32) -> F32:
    """The same feed-forward as single operations of a program."""

    def bias(slot: int, values: F32 | None) -> list[Operation]:
        return [] if values is None else [operation("add_bias", (slot,), (slot,), bias=values)]

    operations = [
        given(0, x),
        operation("matmul", (0,), (1,), weight=e.gate),
        *bias(1, e.gate_bias),
        operation(e.activation, (1,), (1,)),
        operation("matmul", (0,), (2,), weight=e.up),
        *bias(2, e.up_bias),
        operation("mul", (1, 2), (1,)),
        operation("matmul", (1,), (3,), weight=e.down),
        *bias(3, e.down_bias),
    ]
    return result(operations, len(x), 3)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-{s[1]}-{s[2].name}")
def test_an_expert_is_its_operations_one_by_one(shape: tuple[int, int, GGMLType], word: str, biases: bool) -> None:
    held, x = experts(*shape, count=2, word=word, biases=biases), activations(shape[0], 9)
    bank = native(2).load(held)
    for e, weights_ in held.items():
        ours = bank.rows(x, pairs_of(*[(row, e) for row in range(9)]))
        same_bits(ours, by_steps(weights_, x))
        gate, up, down = (
            dequantise(m.type, m.data).astype(np.float64) for m in (weights_.gate, weights_.up, weights_.down)
        )
        add = [
            0 if b is None else b.astype(np.float64) for b in (weights_.gate_bias, weights_.up_bias, weights_.down_bias)
        ]
        g, u = x @ gate.T + add[0], x @ up.T + add[1]
        exact = (activated(word, g) * u) @ down.T + add[2]
        assert (np.linalg.norm(ours - exact, axis=1) <= 1e-5 * np.linalg.norm(exact, axis=1)).all()


def activated(word: str, x: Any) -> Any:
    """In float64."""
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return {
        "silu": lambda: x / (1 + np.exp(-x)),
        "gelu": lambda: x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2,
        "gelu_tanh": lambda: x * (1 + tanh) / 2,
        "relu": lambda: np.maximum(x, 0),
    }[word]()


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-{s[1]}-{s[2].name}")
def test_bits_depend_on_nothing_else_in_the_call(shape: tuple[int, int, GGMLType], biases: bool) -> None:
    held, x, random = experts(*shape, biases=biases), activations(shape[0]), np.random.default_rng(3)
    banks = [native(threads).load(held) for threads in (1, 2, 3)]
    every = pairs_of(*[(row, e) for row in range(20) for e in range(5)])
    expected = {(r, e): banks[0].rows(x, pairs_of((r, e)))[0].tobytes() for r, e in every.tolist()}
    calls = [
        every,
        every[::-1].copy(),
        random.permutation(every),
        random.permutation(every)[:7],
        every[every[:, 1] == 2],
    ]
    calls += [every[:1], every[:2], np.concatenate([every[:3]] * 2), random.permutation(every)[:33]]
    for bank in banks:
        for call in calls:
            for (r, e), row in zip(call.tolist(), bank.rows(x, call), strict=True):
                assert row.tobytes() == expected[r, e]
        few = np.ascontiguousarray(x[4:6])  # other rows in the call, another place of a row
        assert bank.rows(few, pairs_of((1, 3)))[0].tobytes() == expected[5, 3]


def test_more_rows_of_one_expert_than_a_tile_is_used_for() -> None:
    held, x = experts(64, 96, GGMLType.Q8_0, count=3), activations(64, 700)
    call = pairs_of(*[(row, 1 if row % 10 else 2) for row in range(700)])
    together = native(3).load(held).rows(x, call)
    bank = native(1).load(held)
    for at in (0, 1, 255, 256, 257, 284, 285, 510, 699):
        same_bits(bank.rows(x, call[at : at + 1]), together[at : at + 1])


def test_a_bank_that_holds_some_experts_and_a_call_without_pairs() -> None:
    held = experts(64, 96, GGMLType.Q8_0, count=9)
    some = {e: held[e] for e in (7, 2, 4)}
    x = activations(64, 3)
    call = pairs_of((0, 7), (2, 2), (1, 4), (0, 2))
    same_bits(native(2).load(some).rows(x, call), native(1).load(held).rows(x, call))
    assert native(2).load(some).rows(x, pairs_of()).size == 0


def test_experts_of_different_shapes_are_refused() -> None:
    odd = {0: experts(64, 96, GGMLType.Q8_0)[0], 1: experts(64, 128, GGMLType.Q8_0)[0]}
    with pytest.raises(KernelError, match=r"experts of one layer differ: 64 -> 96 -> 64 \(silu\), 64 -> 128 -> 64"):
        native().load(odd)


# ---- in a program


def moe(
    x: F32,
    scores: F32,
    held: Mapping[int, ExpertWeights],
    *,
    count: int,
    threads: int,
    layer: int = 0,
    head: bool = False,
) -> tuple[list[Operation], Any]:
    """Router scores as they are, the choice, the experts, the sum; perhaps for the wanted rows alone."""
    backend = native(threads)
    bank = backend.load(held)
    operations = [given(0, x), given(1, scores)]
    if head:
        operations += [operation("last", (0,), (0,)), operation("last", (1,), (1,))]
    operations += [
        operation("top_k", (1, -1), (2,), count=count, layer=layer),
        operation("normalize", (2,), (2,), on_weights=True, layer=layer),
        operation("experts", (0, 2), (3,), bank=lambda: bank, outputs=x.shape[1], layer=layer),
        operation("add", (0, 3), (0,)),
    ]
    return operations, bound(operations, backend)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 20])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_in_a_program(rows: int, threads: int, head: bool) -> None:
    held, x = experts(96, 160, GGMLType.Q8_0, biases=True), activations(96)[:rows]
    scores = np.random.default_rng(rows).random((rows, 5)).astype(np.float32)
    operations, program = moe(x, scores, held, count=3, threads=threads, head=head)
    wanted = [rows - 1] if head else list(range(rows))
    ours = run(program, operations, rows_of(rows, program.sequence(), wanted=wanted), 0)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :3].astype(np.int32)
    chosen = reference.normalize(np.take_along_axis(scores, ids, 1))
    call = pairs_of(*[(row, e) for row in range(rows) for e in ids[row]])
    expected = x + combine(native(1).load(held).rows(x, call).reshape(rows, 3, -1), chosen)
    same_bits(ours, expected[wanted])


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activations_", ["f32", "i16"])
def test_threads_wait_for_each_other_between_the_halves_of_an_expert(rows: int, activations_: str) -> None:
    """Large enough for threads to be at different places: again and again, with other rows each time."""
    held = experts(256, 1024, GGMLType.Q4_K, count=4)
    inputs = np.random.default_rng(rows).standard_normal((rows, 256)).astype(np.float32)
    operations: list[Operation] = [given(0, inputs), given(1, inputs[:, :4].copy())]
    for layer in range(6):
        operations += [
            operation("top_k", (1, -1), (2,), count=2, layer=layer),
            operation("softmax", (2,), (2,), on_weights=True, layer=layer),
            operation("experts", (0, 2), (3,), bank=None, outputs=256, layer=layer),
            operation("add", (0, 3), (0,)),
            operation("rms_norm", (0,), (0,), weight=np.ones(256, np.float32), eps=1e-6),
        ]
    outs = []
    for threads in (1, 2, 3):
        backend = native(threads, activations_)
        bank = backend.load(held)
        steps = [
            replace(op, constants={**op.constants, "bank": lambda bank=bank: bank}) if op.name == "experts" else op
            for op in operations
        ]
        program = bound(steps, backend)
        outs += [run(program, steps, rows_of(rows, program.sequence())) for _ in range(1 if threads == 1 else 8)]
        call = pairs_of(*[(row, e) for row in range(rows) for e in range(4)])
        expected = native(1, activations_).load(held).rows(inputs, call)
        for _ in range(8):
            same_bits(bank.rows(inputs, call), expected)
    for out in outs[1:]:
        same_bits(out, outs[0])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 6])
def test_rows_that_are_not_finite_name_their_layer(rows: int, threads: int) -> None:
    held, x = experts(64, 96, GGMLType.Q8_0), activations(64)[:rows]
    x[rows - 1, 63] = np.inf
    scores = np.tile(np.arange(5, dtype=np.float32), (rows, 1))
    operations, program = moe(x, scores, held, count=2, threads=threads, layer=17)
    with pytest.raises(NotFinite, match="layer 17: expert rows are not finite"):
        run(program, operations, rows_of(rows, program.sequence()))
    # What was bad is forgotten: the next run is as good as any.
    x[rows - 1, 63] = 0
    operations, program = moe(x, scores, held, count=2, threads=threads, layer=17)
    assert np.isfinite(run(program, operations, rows_of(rows, program.sequence()))).all()


def test_the_first_layer_that_is_not_finite_is_named() -> None:
    held, x = experts(64, 96, GGMLType.Q8_0), activations(64)[:4]
    backend = native(2)
    good = backend.load(held)
    bad = backend.load(
        {
            e: ExpertWeights(
                gate=w.gate, up=w.up, down=w.down, activation="silu", down_bias=np.full(64, np.nan, np.float32)
            )
            for e, w in held.items()
        }
    )
    operations = [given(0, x), given(1, np.ones((4, 5), np.float32))]
    for layer in range(4):
        bank = bad if layer in (1, 2) else good
        operations += [
            operation("top_k", (1, -1), (2,), count=2, layer=layer),
            operation("experts", (0, 2), (3,), bank=lambda bank=bank: bank, outputs=64, layer=layer),
            operation("add", (0, 3), (0,)),
        ]
    program = bound(operations, backend)
    with pytest.raises(NotFinite, match="layer 1:"):
        run(program, operations, rows_of(4, program.sequence()))


def chosen_by(scores: F32, weights_: F32 | None, count: int, threads: int = 2) -> tuple[Any, F32]:
    """ids and weights of top_k."""
    operations = [given(0, scores)]
    if weights_ is not None:
        operations.append(given(2, weights_))
    operations.append(operation("top_k", (0, -1 if weights_ is None else 2), (1,), count=count, layer=0))
    program = bound(operations, native(threads))
    on_its_way = program.begin(rows_of(len(scores), program.sequence()))
    on_its_way.run(0, len(operations))
    chosen = on_its_way.chosen(1)
    found = chosen.ids.copy(), chosen.weights.copy()
    on_its_way.close()
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_top_k_takes_the_largest_and_of_equals_the_lower_id(count: int) -> None:
    random = np.random.default_rng(count)
    scores = random.integers(-3, 4, (200, 40)).astype(np.float32)  # hardly a row without ties
    scores[0], scores[1] = 0, np.where(np.arange(40) % 2, np.float32(-0.0), np.float32(0))  # zeros are equal
    scores[2] = -np.inf
    scores[3, 5:] = -np.inf
    other = random.random((200, 40)).astype(np.float32)
    ids, taken = chosen_by(scores, None, count)
    assert np.array_equal(ids, np.argsort(-scores, axis=1, kind="stable")[:, :count])
    same_bits(taken, np.take_along_axis(scores, ids, 1))
    ids_by, taken = chosen_by(scores, other, count)
    assert np.array_equal(ids_by, ids)
    same_bits(taken, np.take_along_axis(other, ids, 1))


def test_top_k_of_what_is_no_number() -> None:
    scores = np.float32(
        [[np.nan, 1, np.nan, 3], [np.nan] * 4, [np.nan, -np.inf, 2, np.nan], [1, np.inf, np.nan, np.inf]]
    )
    ids, _ = chosen_by(scores, None, 2)
    assert ids.tolist() == [[3, 1], [0, 1], [2, 0], [1, 3]]
    ids, _ = chosen_by(scores, None, 4)
    assert [sorted(row) for row in ids.tolist()] == [[0, 1, 2, 3]] * 4


def test_given_ids_and_whose_weights_they_get() -> None:
    held, x = experts(64, 96, GGMLType.Q8_0), activations(64)[:5]
    scores = np.random.default_rng(1).random((5, 5)).astype(np.float32)
    operations, program = moe(x, scores, held, count=2, threads=2)
    ids = np.int32([[4, 0], [1, 1], [3, 2], [0, 1], [2, 4]])
    rows = rows_of(5, program.sequence())
    rows = Rows(rows.tokens, rows.positions, rows.sequences, rows.wanted, given_ids={0: ids})
    ours = run(program, operations, rows)
    w = reference.normalize(np.take_along_axis(scores, ids, 1))
    made = native(1).load(held).rows(x, pairs_of(*[(r, e) for r in range(5) for e in ids[r]]))
    same_bits(ours, x + combine(made.reshape(5, 2, -1), w))


def test_the_interpreter_agrees() -> None:
    held, x = experts(96, 160, GGMLType.Q8_0), activations(96)
    scores = np.random.default_rng(2).random((20, 5)).astype(np.float32)
    operations, program = moe(x, scores, held, count=3, threads=2)
    ours = run(program, operations, rows_of(20, program.sequence()))
    plain = Interpreter(operations, [1] * 4)
    theirs = run(plain, operations, rows_of(20, plain.sequence()))
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()
