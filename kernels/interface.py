"""What a compute backend is: numeric class, expert rows. Knows no sockets and no model files.

Legend: n rows, D hidden width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .matrix import Matrix

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericClass:
    """Everything that can change a bit of an expert row. Equal classes give equal bits; nothing else does."""

    name: str  #: order of summation, kernel source, compiled variant or library build, CPU model where it matters
    accumulation: str = "f32"  #: dtype in which products are summed
    activations: str = "f32"  #: dtype of the activations that are multiplied

    def __str__(self) -> str:
        return f"{self.name}/{self.activations}/{self.accumulation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert of one layer. `down @ (activation(gate @ x + gate_bias) * (up @ x + up_bias)) + down_bias`."""

    gate: Matrix  # [F, D]
    up: Matrix  # [F, D]
    down: Matrix  # [D, F]
    activation: str  #: a word of kernels.reference.ACTIVATIONS
    gate_bias: F32 | None = None  # [F]
    up_bias: F32 | None = None  # [F]
    down_bias: F32 | None = None  # [D]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that this expert keeps resident."""
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes + sum(b.nbytes for b in biases if b is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a backend is to compute, so far as it has a choice."""

    threads: int = 0  #: that compute; 0: one for each physical core available to the process
    activations: str = "f32"  #: dtype of the activations that are multiplied: "f32" or "i16"


class Backend(Protocol):
    """A way to compute expert rows on some hardware."""

    @property
    def name(self) -> str:
        """The word that `--backend` takes."""

    @property
    def device(self) -> str:
        """The hardware, as a person would name it."""

    @property
    def numeric_class(self) -> NumericClass:
        """What this backend's bits depend on."""

    def expert_rows(self, expert: ExpertWeights, x: F32) -> F32:
        """Unweighted output rows [n, D] float32 of one expert for x [n, D]; row i depends on x[i] alone."""


class DenseBackend(Backend, Protocol):
    """A backend that also runs the dense path, as the backbone needs."""

    def operation(self, name: str, constants: dict[str, Any]) -> Callable[..., Any]:
        """An operation of the op table with everything fixed that is no register (and no `rows`).

        The result takes the registers in the table's order, then `rows=` where the operation needs it.
        """
