"""Where expert rows come from: this process, or a swarm. The executor knows only `ExpertSource`.

Legend: T rows, K chosen experts a row, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kernels import registry
from kernels.combine import pairs_of
from kernels.device.interface import DeviceError
from kernels.interface import F32, I32, Backend, ExpertBank, ExpertWeights

from .class_map import MapChange

log = logging.getLogger(__name__)

Ticket = Any  #: what `send` gives and `wait` takes


class ExpertSource(Protocol):
    """Computes the chosen experts' rows. `send` goes on at once; the first reader waits."""

    @property
    def is_here(self) -> bool:
        """Whether all experts are in this process: a program then runs them itself, and asks for nothing."""

    @property
    def busiest_ns(self) -> int:
        """Nanoseconds that the busiest worker computed, by its own word, for the ticket that was waited for last."""

    @property
    def class_changes(self) -> Sequence[MapChange]:
        """Each time, so far, that experts went over to another numeric class, in order."""

    @property
    def doubts(self) -> int:
        """How often, so far, a worker was found to be wrong whose rows had been used."""

    def send(self, layer: int, x: F32, ids: I32) -> Ticket:
        """Ask for the experts `ids` [T, K] of `layer` on rows x [T, D]. Returns at once."""

    def ready(self, ticket: Ticket) -> bool:
        """Whether `wait` would return at once."""

    def wait(self, ticket: Ticket) -> F32:
        """The unweighted rows [T, K, D]: row t of expert ids[t, k] at [t, k]. BackboneError when they cannot be had."""

    def abandon(self) -> None:
        """Forget every ticket that was not waited for."""


class LocalRows(Protocol):
    """Computes rows of an expert in this process."""

    def rows(self, layer: int, expert: int, x: F32) -> F32:
        """Unweighted rows [n, D] of one expert for x [n, D]."""


class LocalExperts:
    """Every expert in this process, from the mapped file. A layer's are loaded when they are first asked for.

    What a device cannot hold, or fails at, is computed by its stand-in on the CPU, whose bits are the same.
    """

    is_here = True
    busiest_ns = 0  #: what is computed here is done when `send` returns
    class_changes = ()
    doubts = 0

    def __init__(
        self,
        backend: Backend,
        experts: Callable[[int], Mapping[int, ExpertWeights]],
        stand_in: Callable[[Backend], Backend | None] = registry.stand_in,
    ) -> None:
        self._backend, self._experts, self._find_stand_in = backend, experts, stand_in
        self._banks: dict[int, ExpertBank] = {}
        self._stand_in: Backend | None = None

    def bank(self, layer: int) -> ExpertBank:
        """All experts of a layer. DeviceError when the device cannot hold them and has no stand-in."""
        if layer not in self._banks:
            experts = self._experts(layer)
            try:
                self._banks[layer] = self._backend.load(experts)
            except DeviceError as error:
                self._banks[layer] = self._other(error).load(experts)
        return self._banks[layer]

    def _other(self, error: DeviceError) -> Backend:
        """The stand-in. What else there is to load is asked of the device first: it may have room for that."""
        if self._stand_in is None:
            self._stand_in = self._find_stand_in(self._backend)
            if self._stand_in is None:
                raise error
            log.warning("%s; what it cannot do is computed by %s", error, self._stand_in.name)
        return self._stand_in

    def _rows(self, layer: int, x: F32, pairs: I32) -> F32:
        try:
            return self.bank(layer).rows(x, pairs)
        except DeviceError as error:
            self._banks[layer] = self._other(error).load(self._experts(layer))
            return self._banks[layer].rows(x, pairs)

    def rows(self, layer: int, expert: int, x: F32) -> F32:
        """Unweighted rows [n, D] of one expert for x [n, D]."""
        return self._rows(layer, x, pairs_of(np.full((len(x), 1), expert, np.int32)))

    def send(self, layer: int, x: F32, ids: I32) -> F32:
        """Computes at once: there is nobody else to do it."""
        return self._rows(layer, x, pairs_of(ids)).reshape(*ids.shape, -1)

    def ready(self, ticket: F32) -> bool:
        """Always: the rows are there when `send` returns."""
        return True

    def wait(self, ticket: F32) -> F32:
        """The rows that `send` computed."""
        return ticket

    def abandon(self) -> None:
        """Nothing is under way here."""
