"""Rows rounded to F16, which take half the bytes on a slow line.

F16 has 11 significant bits between 2^-14 and 2^16, and fewer below. So each row is scaled by a power of two that brings
its largest value to between 2^14 and 2^15, rounded, and scaled back: of a row of any size every value that is not 2^28
times smaller than the largest keeps its 11 bits. The exponent travels as one value more at the row's end.

A kind of rows is "f32" or "f16".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .interface import F32, I32

ULP = 2.0**-10  #: between two neighbours, beside the smaller: how far apart two roundings of nearly the same value are
_LARGEST = 15  #: the exponent, as of frexp, that a row's largest value is brought to
_MOST = np.float32((2 - 2.0**-10) * 2.0**127)  #: of 11 bits; what F32 has beyond would be rounded to infinity


def halved(rows: F32) -> F32:
    """Rows [..., W] float32 rounded to 11 bits of each row's own scale. A row that is not finite stays so."""
    half, exponents = _scaled(rows)
    return _back(half, exponents)


def packed(rows: F32, kind: str) -> Any:
    """Rows [..., W] as they are sent: float32 [..., W], or float16 [..., W + 1], rounded."""
    if kind != "f16":
        return rows
    half, exponents = _scaled(rows)
    return np.concatenate([half, exponents[..., None].astype(np.float16)], axis=-1)


def unpacked(data: Any, shape: tuple[int, ...], kind: str) -> F32:
    """Rows that came with this shape, in a buffer of its size: float32, a view of it where it has that.

    What no packing has made, an exponent that is none or out of range, gives rows that are not finite.
    """
    if kind != "f16":
        rows: F32 = np.frombuffer(data, "<f4").reshape(shape)
        return rows
    carried = np.frombuffer(data, "<f2").reshape(shape)
    exponents = carried[..., -1].astype(np.float32)
    is_right = (np.abs(exponents) <= 256) & (exponents == np.rint(exponents))
    rows = _back(carried[..., :-1], np.where(is_right, exponents, 0).astype(np.int32))
    return rows if is_right.all() else np.where(is_right[..., None], rows, np.float32(np.nan))


def _scaled(rows: F32) -> tuple[NDArray[np.float16], I32]:
    largest = np.abs(rows).max(axis=-1)
    if (largest > _MOST).any():
        rows = np.where(np.isfinite(rows), np.clip(rows, -_MOST, _MOST), rows)
        largest = np.abs(rows).max(axis=-1)
    with np.errstate(all="ignore"):
        # Rounded to 11 bits first: what rounds up to the next power of two has its exponent, and stays as it is when it
        # is rounded again.
        mantissas, exponents = np.frexp(largest)
        exponents = exponents + (np.rint(mantissas * 2048) >= 2048)
        exponents = np.where(np.isfinite(largest), exponents, _LARGEST).astype(np.int32)
        half = np.ldexp(rows, (_LARGEST - exponents)[..., None]).astype(np.float16)
    return half, exponents


def _back(half: NDArray[np.float16], exponents: I32) -> F32:
    with np.errstate(all="ignore"):
        rows: F32 = np.ldexp(half.astype(np.float32), (exponents - _LARGEST)[..., None])
    return rows
