"""A call's rows: each pair's row through its expert. Knows no messages and no sockets.

Legend: R distinct rows, P pairs of (row, expert), D width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from kernels.errors import KernelError
from kernels.interface import F32, I32, Backend, ExpertWeights

from .errors import WorkerError


class Layer:
    """The experts of one layer that a worker holds, loaded into its backend."""

    def __init__(self, backend: Backend, experts: Mapping[int, ExpertWeights]) -> None:
        """WorkerError when the experts are not of one shape, or the backend cannot take them."""
        try:
            self._bank = backend.load(experts)
        except KernelError as error:
            raise WorkerError(str(error)) from None
        self._held = frozenset(experts)
        self._width = next(iter(experts.values())).gate.cols

    def rows(self, x: F32, pairs: I32) -> tuple[F32, int]:
        """Unweighted rows [P, width] float32 for pairs [P, 2] over x [R, D], and the nanoseconds that computing took.

        A row's bits do not depend on what else is in the call. WorkerError for a pair that cannot be.
        """
        if x.shape[1] != self._width:
            raise WorkerError(f"rows of {x.shape[1]} values for experts that take {self._width}")
        rows, experts = pairs[:, 0], pairs[:, 1]
        if not (wrong := rows[(rows < 0) | (rows >= len(x))]).size == 0:
            raise WorkerError(f"a pair of row {wrong[0]}; {len(x)} rows came")
        for expert in experts.tolist():
            if expert not in self._held:
                raise WorkerError(f"expert {expert} is not held here")
        started = time.perf_counter_ns()
        return self._bank.rows(x, pairs), time.perf_counter_ns() - started
