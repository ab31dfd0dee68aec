"""What rows would be without rounding: experts and operations in float64, to measure a class's error by.

Weights are the dequantised ones, which every class starts from; all else is float64 from end to end.
Legend: T rows, W width, H heads, K kv heads, D head width, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .interface import F32, ExpertWeights
from .matrix import Matrix

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Error:
    """How far rows are from the exact ones. A row that should be zero counts by its own norm."""

    worst: float  #: the largest relative L2 distance of a row
    median: float  #: the median over rows
    largest: float  #: the largest absolute difference of a value
    least_cosine: float  #: the smallest cosine of a row and its exact one


def error_of(ours: F32 | F64, exact: F64) -> Error:
    """The error of rows [T, W]. A row with a value that is no finite number is infinitely far."""
    mine = ours.astype(np.float64)
    bad: NDArray[np.bool_] = np.logical_not(np.isfinite(mine).all(axis=1))
    mine = np.where(bad[:, None], 0, mine)
    lengths, mine_lengths = np.linalg.norm(exact, axis=1), np.linalg.norm(mine, axis=1)
    distances = np.linalg.norm(mine - exact, axis=1) / np.where(lengths > 0, lengths, 1)
    both = lengths * mine_lengths
    cosines = np.where(both > 0, (mine * exact).sum(axis=1) / np.where(both > 0, both, 1), 1)
    distances[bad], cosines[bad] = math.inf, -1
    largest = math.inf if bad.any() else float(np.abs(mine - exact).max())
    return Error(float(distances.max()), float(np.median(distances)), largest, float(min(1.0, cosines.min())))


def _sigmoid(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def _gelu(x: F64) -> F64:
    erf: F64 = np.vectorize(math.erf, otypes=[np.float64])(x * math.sqrt(0.5))
    return 0.5 * x * (1 + erf)


def _gelu_tanh(x: F64) -> F64:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))))


#: Functions of one value, by the operation's name.
ELEMENTWISE: Mapping[str, Callable[[F64], F64]] = {
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def matmul(x: F64, weight: Matrix) -> F64:
    """weight [out, W] times each row of x [T, W], [T, out]."""
    out = np.empty((len(x), weight.rows))
    for part, tile in weight.tiles():
        out[:, part] = x @ tile.astype(np.float64).T
    return out


def expert_rows(expert: ExpertWeights, x: F32 | F64) -> F64:
    """An expert's unweighted rows [T, W]."""
    wide = x.astype(np.float64)
    gate, up = matmul(wide, expert.gate), matmul(wide, expert.up)
    if expert.gate_bias is not None:
        gate += expert.gate_bias
    if expert.up_bias is not None:
        up += expert.up_bias
    down = matmul(ELEMENTWISE[expert.activation](gate) * up, expert.down)
    return down if expert.down_bias is None else down + expert.down_bias


def rms_norm(x: F32 | F64, weight: F32, eps: float) -> F64:
    """x / sqrt(mean(x * x) + eps) * weight, [T, W]."""
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps) * weight)


def softmax(x: F32 | F64) -> F64:
    """exp(x - max) / sum over the row."""
    return _softmax(x.astype(np.float64))


def _softmax(wide: F64) -> F64:
    e = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def rope(x: F32 | F64, cos: F32 | F64, sin: F32 | F64, heads: int, *, neighbours: bool) -> F64:
    """x [T, H * D] turned by cos and sin [T, n/2]: halves (i, i + n/2), or neighbours (2i, 2i + 1)."""
    out = x.astype(np.float64).reshape(len(x), heads, -1)
    half = cos.shape[1]
    first = slice(0, 2 * half, 2) if neighbours else slice(0, half)
    second = slice(1, 2 * half, 2) if neighbours else slice(half, 2 * half)
    a, b = out[..., first].copy(), out[..., second].copy()
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out.reshape(x.shape)


def attention(
    q: F32,
    k: F32,
    v: F32,
    *,
    heads: int,
    kv_heads: int,
    window: int = 0,
    softcap: float = 0,
    sinks: F32 | None = None,
) -> F64:
    """Causal attention over one sequence from position 0, scale 1/sqrt(D), [T, H * Dv]."""
    count, group = len(q), heads // kv_heads
    wide_q = q.astype(np.float64).reshape(count, heads, -1)
    wide_k = k.astype(np.float64).reshape(count, kv_heads, -1)
    wide_v = v.astype(np.float64).reshape(count, kv_heads, -1)
    behind = np.arange(count)[:, None] - np.arange(count)[None]
    hidden = (behind < 0) | (behind >= window if window else np.zeros_like(behind, bool))
    out = np.empty((count, heads, wide_v.shape[2]))
    for head in range(heads):
        scores = wide_q[:, head] @ wide_k[:, head // group].T / math.sqrt(wide_q.shape[2])
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores[hidden] = -np.inf
        if sinks is not None:
            scores = np.concatenate([scores, np.full((count, 1), np.float64(sinks[head]))], axis=1)
        out[:, head] = _softmax(scores)[:, :count] @ wide_v[:, head // group]
    return out.reshape(count, -1)
