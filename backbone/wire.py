"""How rows cross the wire to workers and back: as they are, or rounded to F16 whoever computes them."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.half import ULP, halved, packed, unpacked
from kernels.interface import F32
from protocol.frames import DType, Tensor


@dataclass(frozen=True, slots=True)
class Wire:
    """Of one swarm."""

    kind: str = "f32"  #: or f16

    def rounded(self, rows: F32) -> F32:
        """Rows [..., W] as an expert gets them, or as what it gives is used."""
        return halved(rows) if self.kind == "f16" else rows

    def bar(self, tolerance: float) -> float:
        """How far off rows may be that are allowed this relative L2 distance before they are rounded."""
        return tolerance + ULP if self.kind == "f16" else tolerance

    def admits(self, tensor: Tensor) -> bool:
        """Whether a worker may send rows of this kind."""
        return tensor.dtype is DType.F32 or self.kind == "f16"

    def sent(self, rows: F32, *, is_apart: bool = False) -> Tensor:
        """Rows for a worker, whose answer comes alike. What is asked apart is to be exact."""
        kind, carried = packed(rows, "f32" if is_apart else self.kind)
        return Tensor(DType(kind), rows.shape, carried)


def received(tensor: Tensor) -> F32:
    """A worker's rows, of whatever kind they came in."""
    return unpacked(tensor.data, tensor.shape, tensor.dtype.value)
