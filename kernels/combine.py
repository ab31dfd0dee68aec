"""The deterministic combine: experts' rows merged in float32, in ascending slot order, whoever sent them and when."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def pairs_of(ids: I32) -> I32:
    """What chosen experts ids [T, k] ask for: pairs [T * k, 2] of (row, expert), row by row."""
    pairs = np.empty((ids.size, 2), np.int32)
    pairs[:, 0] = np.repeat(np.arange(len(ids), dtype=np.int32), ids.shape[1])
    pairs[:, 1] = ids.reshape(-1)
    return pairs


def combine(rows: F32, weights: F32) -> F32:
    """Merge rows [T, k, D] by weights [T, k] into [T, D] float32.

    Slot order is the router's rank order, 0 to k - 1: each product is rounded, then added.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        merged = rows[:, 0] * weights[:, 0, None]
        for slot in range(1, rows.shape[1]):
            merged += rows[:, slot] * weights[:, slot, None]
    return merged


def is_finite(values: F32) -> bool:
    """Whether every value is a finite number."""
    # A sum of squares is finite only if all values are, and takes a third of the time; large ones may overflow it.
    flat = values.reshape(-1)
    return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())
