"""Rows rounded to F16, which take half the bytes on a slow line. A row with a value that F16 cannot hold stays F32.

A kind of rows is "f32" or "f16".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .interface import F32

ULP = 2.0**-10  #: of F16, beside the value, at most: how far two roundings of values next to each other are apart


def halved(rows: F32) -> F32:
    """Rows [..., W] rounded to F16, to nearest even; one with a value that overflows is left as it is."""
    with np.errstate(over="ignore"):
        rounded: F32 = rows.astype(np.float16).astype(np.float32)
    fits = np.isfinite(rounded).all(axis=-1, keepdims=True)
    return rounded if fits.all() else np.where(fits, rounded, rows)


def packed(rows: F32, kind: str) -> tuple[str, Any]:
    """Rows as they are sent, [..., W] float32 or float16, and which of these: F16 only where all of them fit."""
    if kind == "f16":
        with np.errstate(over="ignore"):
            half = rows.astype(np.float16)
        if np.isfinite(half).all():
            return "f16", half
    return "f32", rows


def unpacked(data: Any, shape: tuple[int, ...], kind: str) -> F32:
    """Rows of this shape as they came, in a buffer of its size: float32, a view of it where it has that."""
    rows = np.frombuffer(data, "<f2" if kind == "f16" else "<f4").reshape(shape)
    return rows.astype(np.float32, copy=False)
