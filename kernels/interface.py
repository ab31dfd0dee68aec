"""What a compute backend is: numeric class, expert rows, bound programs. Knows no sockets and no model files.

Legend: n rows, D hidden width, F expert width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import KernelError
from .matrix import Matrix
from .state import Chosen, Rows, Sequence

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


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
    kv_cache: str = "f32"  #: dtype in which keys and values are kept: "f32" or "f16"
    accumulation: str = "f32"  #: dtype in which products are summed: "f32", or "f16" as device/lanes_f16.h has it


def one_shape(experts: Iterable[ExpertWeights]) -> ExpertWeights:
    """Any of a layer's experts. KernelError when they differ in shape or activation, or there is none."""
    shapes = {(e.gate.rows, e.gate.cols, e.down.rows, e.activation): e for e in experts}
    if len(shapes) != 1:
        told = ", ".join(f"{cols} -> {rows} -> {out} ({word})" for rows, cols, out, word in sorted(shapes))
        raise KernelError(f"experts of one layer differ: {told or 'there is none'}")
    return next(iter(shapes.values()))


class ExpertBank(Protocol):
    """Experts of one layer, ready to compute: on a device they are resident."""

    def rows(self, x: F32, pairs: I32) -> F32:
        """Unweighted rows [P, width] float32 for pairs [P, 2] of (row of x [R, D], expert).

        A row's bits depend on nothing else in the call. The caller has checked that rows and experts exist.
        """


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

    @property
    def threads(self) -> int:
        """Threads that compute."""

    @property
    def memory_bytes(self) -> int:
        """Most bytes of experts that its hardware can hold; 0 where that is this machine's own memory."""

    def load(self, experts: Mapping[int, ExpertWeights]) -> ExpertBank:
        """Experts of one layer by id, all of the same shape and activation. KernelError when they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A step of a program on slots, with everything in it that is no register.

    `constants` holds numbers, `Matrix` and float32 vectors by argument; for `experts` also `bank`, which gives the
    layer's experts when they are first needed here.
    """

    name: str
    inputs: tuple[int, ...]  #: slots; -1 for a named register that was not given
    outputs: tuple[int, ...]  #: slots; for an operation in place the one that it changes
    constants: Mapping[str, Any]
    layer: int = -1  #: -1 before the first and after the last
    memory: int = -1  #: which of a sequence's memories it owns
    on_weights: bool = False  #: changes the weights of what top_k gave


class Run(Protocol):
    """A program on one batch of rows."""

    def run(self, start: int, stop: int) -> None:
        """Run operations start to stop.

        NotFinite when experts' rows are not finite.
        """

    def values(self, slot: int) -> F32:
        """What a slot holds, [rows, width] float32: a view that lasts until the slot is written again."""

    def chosen(self, slot: int) -> Chosen:
        """What top_k left in a slot; views likewise."""

    def put(self, slot: int, values: F32) -> None:
        """Fill a slot."""

    def close(self) -> None:
        """Let go of the slots. Views end here."""


class Program(Protocol):
    """Operations bound to a backend."""

    def sequence(self) -> Sequence:
        """A new, empty sequence with the memories that the operations need."""

    def begin(self, rows: Rows, ns: NDArray[np.int64] | None = None) -> Run:
        """Start on a batch of rows. ValueError when a row's position does not follow what its sequence holds.

        With `ns` the nanoseconds of each part of `kernels.parts.PARTS` are added up there.
        """


class DenseBackend(Backend, Protocol):
    """A backend that also runs the dense path, as the backbone needs."""

    def program(self, operations: Seq[Operation], slot_widths: Seq[int]) -> Program:
        """Bind a whole program. `slot_widths`: the most values a row that each slot holds."""
