"""Where expert rows come from: this process, or a swarm. The executor knows only `ExpertSource`.

Legend: T rows, K chosen experts a row, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.interface import F32, Backend, ExpertWeights

I32 = NDArray[np.int32]
Ticket = Any  #: what `send` gives and `wait` takes


class ExpertSource(Protocol):
    """Computes the chosen experts' rows. `send` goes on at once; the first reader waits."""

    def send(self, layer: int, x: F32, ids: I32) -> Ticket:
        """Ask for the experts `ids` [T, K] of `layer` on rows x [T, D]. Returns at once."""

    def ready(self, ticket: Ticket) -> bool:
        """Whether `wait` would return at once."""

    def wait(self, ticket: Ticket) -> F32:
        """The unweighted rows [T, K, D]: row t of expert ids[t, k] at [t, k]. BackboneError when they cannot be had."""

    def abandon(self) -> None:
        """Forget every ticket that was not waited for."""


class LocalExperts:
    """Every expert in this process, from the mapped file."""

    def __init__(self, backend: Backend, weights: Mapping[int, tuple[ExpertWeights, ...]]) -> None:
        self._backend = backend
        self._weights = weights

    def rows(self, layer: int, expert: int, x: F32) -> F32:
        """Unweighted rows [n, D] of one expert for x [n, D]."""
        return self._backend.expert_rows(self._weights[layer][expert], x)

    def send(self, layer: int, x: F32, ids: I32) -> F32:
        """Computes at once: there is nobody else to do it."""
        out = np.empty((*ids.shape, self._weights[layer][0].down.rows), np.float32)
        for expert in np.unique(ids):
            row, slot = np.nonzero(ids == expert)
            out[row, slot] = self.rows(layer, int(expert), x[row])
        return out

    def ready(self, ticket: F32) -> bool:
        """Always: the rows are there when `send` returns."""
        return True

    def wait(self, ticket: F32) -> F32:
        """The rows that `send` computed."""
        return ticket

    def abandon(self) -> None:
        """Nothing is under way here."""
