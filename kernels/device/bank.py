"""A layer's experts on a device: quantised bytes resident, several (row, expert) pairs in one launch.

Legend: R rows of x, P pairs, D width, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import KernelError
from ..interface import F32, I32, ExpertWeights, one_shape
from ..matrix import Matrix
from .interface import Buffer, DeviceMemoryError
from .kernels import Kernels, Matrices
from .room import Room

#: Activations of experts by their number in the source.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class DeviceBank:
    """Experts of one layer. Its memory goes back to the device with it."""

    def __init__(self, name: str, kernels: Kernels, room: Room, experts: Mapping[int, ExpertWeights]) -> None:
        """KernelError when the experts differ, DeviceMemoryError with numbers when they do not fit."""
        one = one_shape(experts.values())
        order = sorted(experts)
        self._kernels, self._room, self._activation = kernels, room, ACTIVATIONS[one.activation]
        self._slots = np.full(order[-1] + 1, -1, np.int32)
        self._slots[order] = np.arange(len(order))
        chosen = [experts[i] for i in order]
        try:
            self._gate = self._resident([e.gate for e in chosen], [e.gate_bias for e in chosen])
            self._up = self._resident([e.up for e in chosen], [e.up_bias for e in chosen])
            self._down = self._resident([e.down for e in chosen], [e.down_bias for e in chosen])
        except DeviceMemoryError as error:
            size = sum(e.nbytes for e in chosen)
            raise DeviceMemoryError(
                f"{name}: {len(chosen)} experts of {size / 1e6:.1f} MB do not fit ({error}); give it less by --memory "
                "or --worker-memory"
            ) from None
        self._warm_up(order[0])

    def _resident(self, matrices: Sequence[Matrix], biases: Sequence[F32 | None]) -> Matrices:
        one, device = matrices[0], self._kernels.device
        if kinds := {m.type.name for m in matrices} - {one.type.name}:
            raise KernelError(
                f"experts of one layer are of several types: {', '.join(sorted({one.type.name, *kinds}))}"
            )
        data = device.alloc(one.nbytes * len(matrices))
        for i, matrix in enumerate(matrices):
            device.write(data, np.ascontiguousarray(matrix.data), i * one.nbytes)
        bias = None
        if any(b is not None for b in biases):
            if any(b is None for b in biases):
                raise KernelError("some experts of one layer have a bias and some have none")
            bias = self._kernels.upload(np.stack([b for b in biases if b is not None]).astype(np.float32))
        return Matrices(one.type, one.rows, one.cols, data, bias)

    def _warm_up(self, expert: int) -> None:
        """Compile now what the first call would have to wait for: drivers do it when a kernel is first launched."""
        kinds = self._gate.type, self._up.type, self._down.type
        if kinds not in self._kernels.warm:
            self._kernels.warm.add(kinds)
            for rows in (1, 2):
                pairs = np.array([(row, expert) for row in range(rows)], np.int32)
                self.rows(np.zeros((rows, self._gate.cols), np.float32), pairs)

    @property
    def outputs(self) -> int:
        """Values of an expert's row."""
        return self._down.rows

    def compute(self, x: Buffer, pairs: I32, out: Buffer) -> None:
        """Rows of pairs [P, 2] over x [R, D] on the device, into out [P, D]."""
        order = np.argsort(pairs[:, 1], kind="stable").astype(np.int32)
        experts, counts = np.unique(pairs[:, 1], return_counts=True)
        groups = list(zip(self._slots[experts].tolist(), counts.tolist(), strict=True))
        kernels, gate, up = self._kernels, self._gate, self._up
        hidden = self._room.of("hidden", 4 * len(pairs) * gate.rows)
        from_x = kernels.work(groups, pairs[order, 0], order)
        if gate.type is up.type:
            kernels.gated(gate, up, self._activation, x, hidden, from_x)
        else:
            other = self._room.of("up", 4 * len(pairs) * gate.rows)
            kernels.products(gate, x, hidden, from_x)
            kernels.products(up, x, other, from_x)
            kernels.elementwise("gate", hidden, hidden, len(pairs), gate.rows, y=other, activation=self._activation)
        kernels.products(self._down, hidden, out, kernels.work(groups, order, order))

    def rows(self, x: F32, pairs: I32) -> F32:
        """Unweighted rows [P, width] float32 for pairs [P, 2] of (row of x [R, D], expert)."""
        device, out = self._kernels.device, np.empty((len(pairs), self.outputs), np.float32)
        if not len(pairs):
            return out
        here = self._room.of("x", x.nbytes)
        device.write(here, np.ascontiguousarray(x, np.float32))
        there = self._room.of("rows", out.nbytes)
        self.compute(here, np.asarray(pairs, np.int32), there)
        device.read(there, out)
        return out
