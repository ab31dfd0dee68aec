"""The canonical order in numpy, written from its description alone: what every compiled kernel's bits are held against.

Element j of a row goes to lane j mod 32; a lane adds ascending j by fused multiply-add; lanes are added in the tree
i + (i + 16), + 8, + 4, + 2, + 1. Legend: R rows of weights, N rows of activations, K values of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
LANES = 32


def rounded_to_odd(a: F64, b: F64) -> F64:
    """a + b in float64, rounded to odd: rounding the result once more, to float32, is then as rounding once."""
    s = a + b
    t = s - a
    error = (a - (s - t)) + (b - t)  # Knuth: s + error is a + b, exactly
    is_even = (s.view(np.int64) & 1) == 0
    return np.where(is_even & (error != 0), np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c rounded once. The product of two float32 is exact in float64."""
    return rounded_to_odd(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)).astype(np.float32)


def filled(x: F32) -> F32:
    """Rows with the zeros that fill up their last 32 lanes."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LANES)])


def tree(lanes: Any) -> F32:
    """The sum of [..., 32] lanes."""
    step = LANES
    while step > 1:
        step //= 2
        lanes = lanes[..., :step] + lanes[..., step : 2 * step]
    total: F32 = lanes[..., 0]
    return total


def products(w: F32, x: F32) -> F32:
    """w [R, K] times each row of x [N, K]: [N, R]."""
    w, x = filled(w), filled(x)
    lanes = np.zeros((len(x), len(w), LANES), np.float32)
    for j in range(0, w.shape[1], LANES):
        lanes = fma(w[None, :, j : j + LANES], x[:, None, j : j + LANES], lanes)
    return tree(lanes)


def total(x: F32) -> F32:
    """Sums [...] of rows [..., K]: plain additions in lanes, then the tree."""
    x = filled(x)
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for j in range(0, x.shape[-1], LANES):
        lanes = lanes + x[..., j : j + LANES]
    return tree(lanes)


def fma_f16(a: F16, b: F16, c: F16) -> F16:
    """a * b + c rounded once to F16."""
    a64, b64, c64 = (v.astype(np.float64) for v in (a, b, c))
    return rounded_to_odd(a64 * b64, c64).astype(np.float16)


def products_f16(w: F32, x: F32) -> F32:
    """The same with F16 sums: [N, R].

    A row of x is brought to 1 .. 2 by a power of two (from 2^-126 to 2^126) and rounded to F16, as weights are; lanes add
    256 columns in F16, from zero, and these sums in F32.
    """
    _, exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True).astype(np.float64))
    size = np.ldexp(1.0, np.clip(exponent - 1, -126, 126))
    w16, x16 = filled(w).astype(np.float16), filled(x / size).astype(np.float16)
    lanes = np.zeros((len(x), len(w), LANES), np.float32)
    for start in range(0, w16.shape[1], 256):
        run = np.zeros(lanes.shape, np.float16)
        for j in range(start, min(start + 256, w16.shape[1]), LANES):
            run = fma_f16(w16[None, :, j : j + LANES], x16[:, None, j : j + LANES], run)
        lanes = lanes + run.astype(np.float32)
    return tree(lanes) * size.astype(np.float32)
