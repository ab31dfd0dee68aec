"""Every operation in plain numpy: the living definition that every other backend is measured against.

Rows are independent: a row's result never depends on what else is in the batch. Products are one row at a time over
tiles that depend on the matrix alone; transcendentals and sums of norms and softmax are float64, rounded once.
Register arguments come first, in the op table's order; everything else is a keyword, fixed when a model is bound.
Legend: T rows, W a register's width, H heads, K kv heads, D head width, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .interface import ExpertWeights
from .matrix import Matrix
from .rope import RopeTable, frequencies, magnitude
from .state import Chosen, KeyValues, Memory, Rows

F32 = NDArray[np.float32]
LEAST_WEIGHT_SUM = np.float32(2.0**-14)  #: what a sum of chosen weights is raised to before it divides


def _rounded(x: NDArray[np.float64]) -> F32:
    # What does not fit becomes infinite on purpose; whoever cares looks for rows that are not finite.
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def _sigmoid64(x: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-x)))


def _normed(x: F32, weight: F32, eps: float) -> F32:
    wide = x.astype(np.float64)
    mean = np.add.reduce(wide * wide, axis=-1, keepdims=True) / x.shape[-1]
    return _rounded(wide / np.sqrt(mean + eps)) * weight


def embed(*, weight: Matrix, rows: Rows) -> F32:
    """The embedding of each row's token, [T, W]; only those rows of the matrix are read."""
    return weight.take(rows.tokens.astype(np.intp))


def rms_norm(x: F32, *, weight: F32, eps: float) -> F32:
    """x / sqrt(mean(x * x) + eps) * weight over the whole row, [T, W]."""
    return _normed(x, weight, eps)


def matmul(x: F32, *, weight: Matrix) -> F32:
    """weight [out, W] times each row of x [T, W], [T, out]. Each tile is dequantised once for all rows."""
    out = np.empty((len(x), weight.rows), np.float32)
    for part, tile in weight.tiles():
        for row in range(len(x)):
            np.dot(tile, x[row], out=out[row, part])
    return out


def copy(x: F32) -> F32:
    """The same values; later changes of one register do not reach the other."""
    return x.copy()


def last(x: F32, *, rows: Rows) -> F32:
    """The rows whose logits are wanted, [wanted, W]."""
    return x[rows.wanted]


def attention(
    q: F32,
    k: F32,
    v: F32,
    *,
    rows: Rows,
    memory: int,
    heads: int,
    kv_heads: int,
    window: float = 0,
    sinks: F32 | None = None,
    scale: float | None = None,
    scale_width: float | None = None,
    softcap: float = 0,
) -> F32:
    """Causal attention of q [T, H * D] over each row's own sequence, whose keys and values the step remembers.

    Query head h reads kv head h // (H / K). A window of W shows the last W positions, the row's own included. A sink
    is one more score of each head, whose weight is dropped. Returns [T, H * Dv].
    """
    width, value_width = q.shape[1] // heads, v.shape[1] // kv_heads
    if scale is None:
        scale = 1 / math.sqrt(scale_width if scale_width is not None else width)
    out = np.empty((len(q), heads * value_width), np.float32)
    grouped = q.reshape(len(q), kv_heads, heads // kv_heads, width)
    for row in range(len(q)):
        cache = _key_values(rows.sequences[row].memories[memory])
        position = int(rows.positions[row])
        cache.append(position, k[row].reshape(kv_heads, width), v[row].reshape(kv_heads, value_width))
        start = max(0, position + 1 - int(window)) if window > 0 else 0
        keys, values = cache.window(start, position + 1)
        scores = np.matmul(grouped[row], keys.transpose(0, 2, 1)) * np.float32(scale)  # [K, H / K, P]
        if softcap:
            scores = softcapped(scores, cap=softcap)
        weights = _attention_weights(scores, sinks)
        out[row] = np.matmul(weights, values).reshape(-1)
    return out


def _key_values(memory: Memory) -> KeyValues:
    if not isinstance(memory, KeyValues):
        raise TypeError(f"a sequence of another backend: {type(memory).__name__}")
    return memory


def _attention_weights(scores: F32, sinks: F32 | None) -> F32:
    wide = scores.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    if sinks is None:
        e = np.exp(wide - top)
        return _rounded(e / np.add.reduce(e, axis=-1, keepdims=True))
    sink = sinks.astype(np.float64).reshape(*wide.shape[:2], 1)
    top = np.maximum(top, sink)
    e = np.exp(wide - top)
    return _rounded(e / (np.add.reduce(e, axis=-1, keepdims=True) + np.exp(sink - top)))


def top_k(scores: F32, weights: F32 | None, *, count: int, rows: Rows, layer: int) -> Chosen:
    """The `count` largest scores of each row, descending, ties to the lower id; `weights` are by default the scores."""
    given = rows.given_ids.get(layer) if rows.given_ids is not None else None
    ids = given if given is not None else np.argsort(-scores, axis=-1, kind="stable")[:, :count].astype(np.int32)
    return Chosen(ids, np.take_along_axis(scores if weights is None else weights, ids.astype(np.intp), axis=-1))


def add(x: F32, y: F32) -> F32:
    """x + y, [T, W]."""
    return x + y


def mul(x: F32, y: F32) -> F32:
    """x * y; y [T, 1] scales its row."""
    return x * y


def scale(x: F32, *, factor: float) -> F32:
    """x * factor, the factor rounded to float32 first."""
    return x * np.float32(factor)


def softcapped(x: F32, *, cap: float) -> F32:
    """cap * tanh(x / cap)."""
    return _rounded(cap * np.tanh(x.astype(np.float64) / cap))


def add_bias(x: F32, *, bias: F32) -> F32:
    """x + bias [W]."""
    return x + bias


def norm_heads(x: F32, *, weight: F32, heads: int, eps: float) -> F32:
    """rms_norm of each head [T, H, D] by one weight [D]."""
    return _normed(x.reshape(len(x), heads, -1), weight, eps).reshape(x.shape)


def rope(x: F32, *, rows: Rows, heads: int, table: RopeTable) -> F32:
    """Rotate halves: (i, i + n/2) of each head's first n values."""
    return _rotated(
        x, rows, heads, table, slice(0, table.dimensions // 2), slice(table.dimensions // 2, table.dimensions)
    )


def rope_pairs(x: F32, *, rows: Rows, heads: int, table: RopeTable) -> F32:
    """Rotate neighbours: (2i, 2i + 1) of each head's first n values."""
    return _rotated(x, rows, heads, table, slice(0, table.dimensions, 2), slice(1, table.dimensions, 2))


def _rotated(x: F32, rows: Rows, heads: int, table: RopeTable, first: slice, second: slice) -> F32:
    cos, sin = table.at(rows.positions)
    cos, sin = cos[:, None], sin[:, None]
    out = x.reshape(len(x), heads, -1).copy()
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out.reshape(x.shape)


def turning(constants: Mapping[str, Any]) -> tuple[NDArray[np.float64], float]:
    """How far each pair turns by a position, in radians, and what cos and sin are multiplied by."""
    names = ("dimensions", "base", "factor", "scaling", "original_context", "beta_fast", "beta_slow", "freqs")
    turns = frequencies(**{name: constants[name] for name in names if name in constants})
    sized = {name: constants[name] for name in ("factor", "scaling", "log_multiplier", "attn_factor")}
    return turns, magnitude(**sized)


def _rope_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """The table in place of the numbers that make it."""
    return {"heads": constants["heads"], "table": RopeTable(*turning(constants))}


def softmax(x: F32) -> F32:
    """exp(x - max) / sum over the row."""
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return _rounded(e / np.add.reduce(e, axis=-1, keepdims=True))


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x))."""
    return _rounded(_sigmoid64(x.astype(np.float64)))


def silu(x: F32) -> F32:
    """x * sigmoid(x)."""
    wide = x.astype(np.float64)
    return _rounded(wide * _sigmoid64(wide))


def gelu(x: F32) -> F32:
    """x / 2 * (1 + erf(x / sqrt(2)))."""
    wide = x.astype(np.float64)
    erf = np.vectorize(math.erf, otypes=[np.float64])(wide * math.sqrt(0.5))
    return _rounded(0.5 * wide * (1 + erf))


def gelu_tanh(x: F32) -> F32:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    wide = x.astype(np.float64)
    return _rounded(0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide))))


def relu(x: F32) -> F32:
    """max(x, 0)."""
    rectified: F32 = np.maximum(x, np.float32(0))
    return rectified


def normalize(weights: F32) -> F32:
    """Chosen weights [T, k] divided by their sum (ascending slots, float32), which counts as at least 2^-14."""
    total = weights[:, 0].copy()
    for slot in range(1, weights.shape[1]):
        total += weights[:, slot]
    least: F32 = np.maximum(total, LEAST_WEIGHT_SUM)[:, None]
    return weights / least


def split(x: F32, *, widths: tuple[int, ...]) -> tuple[F32, ...]:
    """The row cut into pieces of these widths."""
    ends = np.cumsum(widths)
    return tuple(np.ascontiguousarray(x[:, end - width : end]) for width, end in zip(widths, ends, strict=True))


def split_heads(x: F32, *, heads: int, widths: tuple[int, ...]) -> tuple[F32, ...]:
    """Each head cut into pieces; `widths` counts the values of all heads together."""
    by_head = x.reshape(len(x) * heads, -1)
    pieces = split(by_head, widths=tuple(width // heads for width in widths))
    return tuple(piece.reshape(len(x), -1) for piece in pieces)


#: Words that `experts` takes.
ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {f.__name__: f for f in (silu, gelu, gelu_tanh, relu)}

#: The function of each operation of the op table, but for `experts`.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        embed, rms_norm, matmul, copy, last, attention, top_k, add, mul, scale, add_bias, norm_heads, rope, rope_pairs,
        softmax, sigmoid, silu, gelu, gelu_tanh, relu, normalize, split, split_heads,
    )
} | {"softcap": softcapped}  # fmt: skip


def expert_rows(expert: ExpertWeights, x: F32) -> F32:
    """down (activation(gate x + gate_bias) * (up x + up_bias)) + down_bias, unweighted, [T, D]."""
    gate, up = matmul(x, weight=expert.gate), matmul(x, weight=expert.up)
    if expert.gate_bias is not None:
        gate += expert.gate_bias
    if expert.up_bias is not None:
        up += expert.up_bias
    down = matmul(ACTIVATIONS[expert.activation](gate) * up, weight=expert.down)
    return down if expert.down_bias is None else down + expert.down_bias


#: What is worked out once, when a model is bound, from an operation's numbers and tensors.
PREPARED: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "rope": _rope_constants,
    "rope_pairs": _rope_constants,
}
