"""What expert rows should be: the backbone's own bits, and float64. For probes and audits, one expert at a time.

Legend: n rows, D width.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np

from kernels import exact
from kernels.errors import KernelError
from kernels.interface import F32, ExpertWeights, NumericClass
from kernels.matrix import Matrix

from .weights import ExpertStore

log = logging.getLogger(__name__)

Kind = tuple[tuple[tuple[str, int, int, int], ...], str]
PARTS = ("gate", "up", "down")


class Judged(ExpertStore, Protocol):
    """A bound model: its experts, which can be computed here one at a time, and the class in which they then are."""

    @property
    def numeric_class(self) -> NumericClass:
        """What the backbone's own bits depend on."""

    def own_rows(self, layer: int, expert: int, x: F32) -> F32:
        """Rows [n, D] of one expert for x [n, D], in the backbone's class. KernelError when they cannot be had."""


def kind_of(store: ExpertStore, layer: int) -> Kind:
    """What decides which kernels a layer's experts need: type and shape of each part, and the activation."""
    parts = store.expert_tensors[layer].items()
    shapes = ((part, int(store.slice_type(tensor)), *store.slice_shape(tensor)) for part, tensor in sorted(parts))
    return tuple(shapes), store.activation(layer)


def expert_of(store: ExpertStore, layer: int, expert: int) -> ExpertWeights:
    """One expert's weights, where the store has them."""
    parts: dict[str, Any] = {}
    for part, tensor in store.expert_tensors[layer].items():
        rows, cols = store.slice_shape(tensor)
        data = np.frombuffer(store.slice_data(tensor, expert), np.uint8)
        matrix = Matrix.of(store.slice_type(tensor), rows, cols, data)
        parts[part] = matrix if part in PARTS else matrix.vector()
    return ExpertWeights(activation=store.activation(layer), **parts)


class Oracle:
    """Rows of a model's experts. What it reads of the model file it lets go of again: the workers hold that."""

    def __init__(self, model: Judged, own_class: str) -> None:
        self.own_class = own_class  #: of the backbone's own bits
        self._model = model

    def own(self, layer: int, expert: int, x: F32) -> F32 | None:
        """The backbone's rows [n, D] for x [n, D]; None where it cannot compute them."""
        try:
            return self._model.own_rows(layer, expert, x)
        except KernelError as error:
            log.debug("expert %d of layer %d cannot be checked here: %s", expert, layer, error)
            return None
        finally:
            self._model.release(layer)

    def error(self, layer: int, expert: int, x: F32, rows: F32) -> float:
        """The largest relative L2 distance of rows [n, D] from the exact ones for x [n, D]."""
        try:
            with np.errstate(all="ignore"):  # what overflows is as far off as can be
                found = exact.error_of(rows, exact.expert_rows(expert_of(self._model, layer, expert), x)).worst
        finally:
            self._model.release(layer)
        return float("inf") if np.isnan(found) else found


def same_bits(a: F32, b: F32) -> bool:
    """Whether two arrays have the same shape and the same bits."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def distance(rows: F32, others: F32) -> float:
    """The largest relative L2 distance of rows [n, D] from others [n, D]; infinite where one is not finite."""
    found = exact.error_of(rows, others.astype(np.float64)).worst
    return found if np.isfinite(others).all() else float("inf")
