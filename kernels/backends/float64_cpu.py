"""The `float64` oracle as a backend: a whole model without rounding, but for its weights, which are as they are stored.

Not one that anybody serves with: what other classes are measured against. Its arrays are float64 from the embedding to
the logits, where the interface says float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from .. import exact, reference
from ..exact import F64
from ..interface import F32, I32, ExpertWeights, NumericClass, Operation, one_shape
from ..interpreter import Functions, Interpreter
from ..matrix import Matrix
from ..state import KeyValues, Rows
from .cpu import cpu_model


def _embed(*, weight: Matrix, rows: Rows) -> F64:
    return weight.take(rows.tokens.astype(np.intp)).astype(np.float64)


def _rms_norm(x: F64, *, weight: F32, eps: float) -> F64:
    return exact.rms_norm(x, weight, eps)


def _norm_heads(x: F64, *, weight: F32, heads: int, eps: float) -> F64:
    return exact.rms_norm(x.reshape(len(x), heads, -1), weight, eps).reshape(x.shape)


def _matmul(x: F64, *, weight: Matrix) -> F64:
    return exact.matmul(x, weight)


def _softmax(x: F64) -> F64:
    return exact.softmax(x)


def _softcapped(x: F64, *, cap: float) -> F64:
    return np.asarray(cap * np.tanh(x / cap))


def _scale(x: F64, *, factor: float) -> F64:
    return x * factor


def _add_bias(x: F64, *, bias: F32) -> F64:
    return x + bias


def _rope(x: F64, *, rows: Rows, heads: int, turns: F64, size: float, neighbours: bool) -> F64:
    angle = rows.positions[:, None] * turns
    cos, sin = np.cos(angle) * size, np.sin(angle) * size
    return exact.rope(x, cos, sin, heads, neighbours=neighbours)


def _turning(constants: dict[str, Any], *, neighbours: bool) -> dict[str, Any]:
    turns, size = reference.turning(constants)
    return {"heads": constants["heads"], "turns": turns, "size": size, "neighbours": neighbours}


def _attention(
    q: F64,
    k: F64,
    v: F64,
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
) -> F64:
    width, value_width = q.shape[1] // heads, v.shape[1] // kv_heads
    if scale is None:
        scale = 1 / math.sqrt(scale_width if scale_width is not None else width)
    out = np.empty((len(q), heads * value_width))
    grouped = q.reshape(len(q), kv_heads, heads // kv_heads, width)
    for row in range(len(q)):
        cache, position = cast(KeyValues, rows.sequences[row].memories[memory]), int(rows.positions[row])
        keys_of, values_of = k[row].reshape(kv_heads, width), v[row].reshape(kv_heads, value_width)
        cache.append(position, cast(F32, keys_of), cast(F32, values_of))
        start = max(0, position + 1 - int(window)) if window > 0 else 0
        keys, values = cache.window(start, position + 1)
        scores = np.matmul(grouped[row], keys.transpose(0, 2, 1)) * scale  # [K, H / K, P]
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if sinks is not None:
            sink = sinks.astype(np.float64).reshape(*scores.shape[:2], 1)
            scores = np.concatenate([scores, sink], axis=-1)
        weights = exact.softmax(scores)[..., : position + 1 - start]
        out[row] = np.matmul(weights, values).reshape(-1)
    return out


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "norm_heads": _norm_heads,
    "matmul": _matmul,
    "attention": _attention,
    "softmax": _softmax,
    "softcap": _softcapped,
    "scale": _scale,
    "add_bias": _add_bias,
    "rope": _rope,
    "rope_pairs": _rope,
    **exact.ELEMENTWISE,
    # These take what they are given.
    **{name: reference.OPERATIONS[name] for name in ("copy", "last", "top_k", "add", "mul", "split", "split_heads")},
    "normalize": reference.normalize,
}
_PREPARED = {
    "rope": lambda constants: _turning(constants, neighbours=False),
    "rope_pairs": lambda constants: _turning(constants, neighbours=True),
}
FUNCTIONS = Functions(_OPERATIONS, _PREPARED)


class Float64Backend:
    """Everything in float64 by numpy."""

    name = "float64"
    memory_bytes = 0
    threads = 1

    def __init__(self) -> None:
        self.device = cpu_model()
        self.numeric_class = NumericClass(name="oracle", accumulation="f64", activations="f64")

    def program(self, operations: Sequence[Operation], slot_widths: Sequence[int]) -> Interpreter:
        """The oracle's functions, one after the other."""
        return Interpreter(operations, slot_widths, FUNCTIONS)

    def load(self, experts: Mapping[int, ExpertWeights]) -> Float64Bank:
        """Experts where they are."""
        one_shape(experts.values())
        return Float64Bank(experts)


class Float64Bank:
    """Experts of one layer."""

    def __init__(self, experts: Mapping[int, ExpertWeights]) -> None:
        self._experts = experts

    def rows(self, x: F32, pairs: I32) -> F32:
        """Unweighted rows [P, width], float64, for pairs [P, 2] of (row of x [R, D], expert)."""
        width = next(iter(self._experts.values())).down.rows
        out = np.empty((len(pairs), width))
        for expert in np.unique(pairs[:, 1]):
            places = np.nonzero(pairs[:, 1] == expert)[0]
            out[places] = exact.expert_rows(self._experts[int(expert)], x[pairs[places, 0]])
        return cast(F32, out)
