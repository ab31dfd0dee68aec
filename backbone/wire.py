"""How rows cross the wire to workers and back: as they are, or rounded to F16 whoever computes them.

Legend: n rows, W width.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.half import ULP, halved, packed, unpacked
from kernels.interface import F32
from protocol.frames import DType, Tensor

from .oracle import distance

NOT_ASKED_FOR = "rows in F16, which it was not asked for"
EXACT = 16  #: calls of which one, on average, goes in F32 all the same: those that measure a worker have to


@dataclass(frozen=True, slots=True)
class Wire:
    """Of one swarm."""

    kind: str = "f32"  #: or f16

    def rounded(self, rows: F32) -> F32:
        """Rows [..., W] as an expert gets them, or as what it gives is used."""
        return halved(rows) if self.kind == "f16" else rows

    def sent(self, rows: F32, *, is_exact: bool) -> Tensor:
        """Rows for a worker, whose answer comes alike. What has been rounded may go exactly, too: it is the same."""
        kind = "f32" if is_exact or random.randrange(EXACT) == 0 else self.kind  # noqa: S311 - not to be told apart
        carried = packed(rows, kind)
        return Tensor(DType(kind), carried.shape, carried)

    def admits(self, tensor: Tensor) -> bool:
        """Whether a worker may send rows of this kind."""
        return tensor.dtype is DType.F32 or self.kind == "f16"

    def is_within(self, rows: F32, others: NDArray[np.floating], tolerance: float) -> bool:
        """Whether rows [n, W] that came are as near to others [n, W], which did not, as a relative L2 distance allows.

        Where rows are rounded the others are, too. Two that are near then differ where a value's two versions have one
        between them at which F16 rounds up: with a chance of their difference by F16's step, and then by the step. So
        the distance's square is the tolerance times a step on average, of the row's; twice that distance, and two steps
        of the row's largest value, are allowed.
        """
        if self.kind != "f16":
            return distance(rows, others) <= tolerance
        wide = halved(others.astype(np.float32)).astype(np.float64)
        lengths, largest = np.linalg.norm(wide, axis=1), np.abs(wide).max(axis=1)
        allowed = (tolerance + 2 * np.sqrt(tolerance * ULP)) * lengths + 2 * ULP * largest
        return bool(np.isfinite(wide).all() and (np.linalg.norm(rows - wide, axis=1) <= allowed).all())


def received(tensor: Tensor) -> F32:
    """A worker's rows, of whatever kind they came in."""
    return unpacked(tensor.data, tensor.shape, tensor.dtype.value)
