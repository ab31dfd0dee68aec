"""The reference ops against plain float64 formulas, and that a row's bits never depend on the batch it is in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from archdefs import ACTIVATIONS as WORDS
from archdefs import OPS
from kernels import reference
from kernels.combine import combine
from kernels.formats import GGMLType
from kernels.interface import ExpertWeights
from kernels.matrix import Matrix
from kernels.state import Chosen, KeyValues, Rows, Sequence

RNG = np.random.default_rng(11)
F32 = NDArray[np.float32]


def normal(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def matrix(values: F32) -> Matrix:
    rows, cols = values.shape
    return Matrix.of(GGMLType.F32, rows, cols, np.ascontiguousarray(values).view(np.uint8).reshape(-1))


def rows_of(count: int, first: int = 0, sequence: Sequence | None = None) -> Rows:
    sequence = sequence or Sequence((KeyValues(),))
    positions = np.arange(first, first + count, dtype=np.int64)
    return Rows(np.arange(count, dtype=np.int32), positions, [sequence] * count, np.arange(count))


def close(ours: F32, exact: Any, relative: float = 3e-7) -> None:
    exact = np.asarray(exact, np.float64)
    assert ours.dtype == np.float32
    assert ours.shape == exact.shape
    assert np.abs(ours - exact).max() <= relative * max(1.0, np.abs(exact).max())


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def erf(x: Any) -> Any:
    return np.vectorize(math.erf)(x)


UNARY = {
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x / 2 * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
}


def test_every_operation_of_the_table_has_a_function() -> None:
    assert set(reference.OPERATIONS) == set(OPS) - {"experts"}
    assert set(reference.ACTIVATIONS) == set(WORDS)


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_register(name: str) -> None:
    x = normal(5, 64) * 4
    close(reference.OPERATIONS[name](x), UNARY[name](x.astype(np.float64)))


def test_gelu_and_gelu_tanh_differ() -> None:
    x = np.linspace(-4, 4, 200, dtype=np.float32)[None]
    assert 1e-4 < np.abs(reference.gelu(x) - reference.gelu_tanh(x)).max() < 1e-2


def test_extreme_values_stay_quiet() -> None:
    x = np.array([[-3e38, -100.0, 0.0, 100.0, 3e38]], np.float32)
    for name in UNARY:
        assert np.isfinite(reference.OPERATIONS[name](x)[0, :4]).all(), name
    assert np.array_equal(reference.softmax(x), [[0, 0, 0, 0, 1]])
    assert np.array_equal(reference.sigmoid(x), [[0, reference.sigmoid(x)[0, 1], 0.5, 1, 1]])


def test_norms() -> None:
    x, weight = normal(3, 48), normal(48)
    wide = x.astype(np.float64)
    close(
        reference.rms_norm(x, weight=weight, eps=1e-5),
        wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight,
    )
    heads = wide.reshape(3, 4, 12)
    exact = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5) * weight[:12]
    close(reference.norm_heads(x, weight=weight[:12], heads=4, eps=1e-5), exact.reshape(3, 48))


def test_matmul_over_several_tiles() -> None:
    x, weight = normal(3, 1024), normal(700, 1024)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert len(list(matrix(weight).tiles())) > 2
    close(reference.matmul(x, weight=matrix(weight)), exact, 1e-6)


def test_elementwise() -> None:
    x, y, one = normal(3, 8), normal(3, 8), normal(3, 1)
    assert np.array_equal(reference.add(x, y), x + y)
    assert np.array_equal(reference.mul(x, y), x * y)
    assert np.array_equal(reference.mul(x, one), x * one)
    assert np.array_equal(reference.scale(x, factor=0.1), x * np.float32(0.1))
    assert np.array_equal(reference.add_bias(x, bias=y[0]), x + y[0])
    copied = reference.copy(x)
    assert np.array_equal(copied, x)
    assert not np.shares_memory(copied, x)
    close(reference.softcapped(x, cap=0.5), 0.5 * np.tanh(x.astype(np.float64) / 0.5))


def test_embed_and_last() -> None:
    table, rows = normal(9, 4), rows_of(3)
    rows.tokens = np.array([8, 0, 8], np.int32)
    rows.wanted = np.array([0, 2])
    assert np.array_equal(reference.embed(weight=matrix(table), rows=rows), table[[8, 0, 8]])
    assert np.array_equal(reference.last(normal(3, 2) * 0 + [[1], [2], [3]], rows=rows), [[1, 1], [3, 3]])


def test_split() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 12)
    a, b = reference.split(x, widths=(4, 8))
    assert np.array_equal(a, x[:, :4])
    assert np.array_equal(b, x[:, 4:])
    a, b = reference.split_heads(x, heads=3, widths=(3, 9))
    assert np.array_equal(a[0], [0, 4, 8])
    assert np.array_equal(b[0], [1, 2, 3, 5, 6, 7, 9, 10, 11])


def test_top_k_descends_and_ties_go_to_the_lower_id() -> None:
    scores = np.array([[1, 3, 2, 3, 0], [0, 0, 0, 0, 0]], np.float32)
    chosen = reference.top_k(scores, None, count=3, rows=rows_of(2), layer=0)
    assert chosen.ids.tolist() == [[1, 3, 2], [0, 1, 2]]
    assert chosen.weights.tolist() == [[3, 3, 2], [0, 0, 0]]
    weighed = reference.top_k(scores, scores * 10, count=1, rows=rows_of(2), layer=0)
    assert weighed.weights.tolist() == [[30], [0]]


def test_normalize() -> None:
    weights = np.array([[0.5, 0.25], [1e-6, 1e-6]], np.float32)
    assert np.array_equal(reference.normalize(weights)[0], np.float32([0.5, 0.25]) / np.float32(0.75))
    assert np.array_equal(reference.normalize(weights)[1], weights[1] / np.float32(6.103515625e-5))


def plain_attention(
    q: F32, k: F32, v: F32, heads: int, kv: int, scale: float, window: int, sinks: Any, cap: float
) -> Any:
    """One query after another, one head after another, in float64."""
    out = np.zeros((len(q), heads, v.shape[1] // kv))
    qs, ks, vs = (a.astype(np.float64).reshape(len(a), n, -1) for a, n in ((q, heads), (k, kv), (v, kv)))
    for t in range(len(q)):
        first = max(0, t - window + 1) if window else 0
        for h in range(heads):
            g = h // (heads // kv)
            s = ks[first : t + 1, g] @ qs[t, h] * scale
            s = cap * np.tanh(s / cap) if cap else s
            e = np.exp(s - s.max())
            total = e.sum() + (np.exp(sinks[h] - s.max()) if sinks is not None else 0)
            out[t, h] = (e / total) @ vs[first : t + 1, g]
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("cap", [0, 2.0])
def test_attention(window: int, sinks: bool, cap: float) -> None:
    q, k, v = normal(9, 24), normal(9, 12), normal(9, 10)
    sink = normal(4) if sinks else None
    ours = reference.attention(
        q, k, v, rows=rows_of(9), memory=0, heads=4, kv_heads=2, window=window, sinks=sink, softcap=cap
    )
    close(ours, plain_attention(q, k, v, 4, 2, 1 / math.sqrt(6), window, sink, cap), 1e-6)
    scaled = reference.attention(q, k, v, rows=rows_of(9), memory=0, heads=4, kv_heads=2, scale_width=9)
    close(scaled, plain_attention(q, k, v, 4, 2, 1 / 3, 0, None, 0), 1e-6)
    wins = reference.attention(q, k, v, rows=rows_of(9), memory=0, heads=4, kv_heads=2, scale=0.25, scale_width=9)
    close(wins, plain_attention(q, k, v, 4, 2, 0.25, 0, None, 0), 1e-6)


def test_sequences_in_one_batch_do_not_see_each_other() -> None:
    q, k, v = normal(6, 8), normal(6, 8), normal(6, 8)
    one, two = Sequence((KeyValues(),)), Sequence((KeyValues(),))
    mixed = Rows(np.zeros(6, np.int32), np.array([0, 0, 1, 1, 2, 2]), [one, two] * 3, np.arange(6))
    together = reference.attention(q, k, v, rows=mixed, memory=0, heads=2, kv_heads=2)
    apart = reference.attention(q[::2], k[::2], v[::2], rows=rows_of(3), memory=0, heads=2, kv_heads=2)
    assert together[::2].tobytes() == apart.tobytes()


def test_positions_must_follow_each_other() -> None:
    cache = KeyValues()
    cache.append(0, normal(2, 4), normal(2, 4))
    with pytest.raises(ValueError, match="position 2 does not follow the 1 that are cached"):
        cache.append(2, normal(2, 4), normal(2, 4))
    cache.truncate(0)
    cache.append(0, normal(2, 4), normal(2, 4))


def test_a_cache_that_grows_keeps_what_it_holds() -> None:
    cache, keys = KeyValues(), normal(700, 2, 4)
    for position, key in enumerate(keys):
        cache.append(position, key, key)
    held, _ = cache.window(0, 700)
    assert np.array_equal(held, keys.transpose(1, 0, 2))


BATCHED: dict[str, Any] = {
    "rms_norm": lambda x: reference.rms_norm(x, weight=np.ones(96, np.float32), eps=1e-6),
    "norm_heads": lambda x: reference.norm_heads(x, weight=np.ones(24, np.float32), heads=4, eps=1e-6),
    "matmul": lambda x: reference.matmul(x, weight=WEIGHT),
    "top_k": lambda x: reference.top_k(x, None, count=7, rows=rows_of(len(x)), layer=0).weights,
    "normalize": lambda x: reference.normalize(np.abs(x)),
} | {name: reference.OPERATIONS[name] for name in UNARY}
WEIGHT = matrix(normal(130, 96))


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("width", [1, 2, 8, 9, 256])
def test_a_rows_bits_do_not_depend_on_its_batch(name: str, width: int) -> None:
    x = normal(width, 96) * 3
    together = BATCHED[name](x)
    apart = np.concatenate([BATCHED[name](x[i : i + 1].copy()) for i in range(width)])
    assert together.tobytes() == apart.tobytes()


@pytest.mark.parametrize("shift", [0, 1, 3, 7])
def test_products_do_not_depend_on_where_the_weights_lie(shift: int) -> None:
    values = normal(33, 200)
    buffer = np.zeros(values.nbytes + 64, np.uint8)
    buffer[4 * shift : 4 * shift + values.nbytes] = values.view(np.uint8).reshape(-1)
    moved = Matrix.of(GGMLType.F32, 33, 200, buffer[4 * shift : 4 * shift + values.nbytes])
    x = normal(2, 200)
    assert reference.matmul(x, weight=moved).tobytes() == reference.matmul(x, weight=matrix(values)).tobytes()


@pytest.mark.parametrize("activation", WORDS)
@pytest.mark.parametrize("with_biases", [False, True])
def test_expert_rows(activation: str, with_biases: bool) -> None:
    gate, up, down, x = normal(40, 24), normal(40, 24), normal(24, 40), normal(5, 24)
    biases = {"gate_bias": normal(40), "up_bias": normal(40), "down_bias": normal(24)} if with_biases else {}
    expert = ExpertWeights(gate=matrix(gate), up=matrix(up), down=matrix(down), activation=activation, **biases)
    g, u = x.astype(np.float64) @ gate.T, x.astype(np.float64) @ up.T
    g, u = g + biases.get("gate_bias", 0), u + biases.get("up_bias", 0)
    exact = (UNARY[activation](g) * u) @ down.T.astype(np.float64) + biases.get("down_bias", 0)
    ours = reference.expert_rows(expert, x)
    worst = np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert worst.max() <= 1e-5  # the project's bar for a class that sums in F32


def test_combine_multiplies_rounds_and_adds_in_slot_order() -> None:
    rows, weights = normal(3, 4, 16), normal(3, 4)
    exact = np.zeros((3, 16), np.float32)
    for t in range(3):
        total = rows[t, 0] * weights[t, 0]
        for k in range(1, 4):
            total = total + rows[t, k] * weights[t, k]
        exact[t] = total
    assert combine(rows, weights).tobytes() == exact.tobytes()


def test_changed_weights_keep_their_ids() -> None:
    chosen = Chosen(np.array([[1, 2]], np.int32), np.float32([[1, 3]]))
    assert chosen.weighted(reference.normalize(chosen.weights)).ids is chosen.ids
