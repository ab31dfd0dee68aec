"""What expert rows should be: by bits where this machine has the class, and in float64. One expert at a time.

Legend: n rows, D width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels import exact
from kernels.errors import KernelError
from kernels.interface import F32, Backend, ExpertWeights, NumericClass
from kernels.matrix import Matrix
from protocol.capabilities import ClassInfo
from protocol.schema import one_line

from .weights import ExpertStore

log = logging.getLogger(__name__)

Kind = tuple[tuple[tuple[str, int, int, int], ...], str]
PARTS = ("gate", "up", "down")


class Judged(ExpertStore, Protocol):
    """A bound model: its experts, and what they can be computed with here."""

    @property
    def numeric_class(self) -> NumericClass:
        """What the backbone's own bits depend on."""

    @property
    def judges(self) -> Iterable[Backend]:
        """Backends whose rows are the measure for whoever says that he is of their class; the backbone's own first."""


def class_text(numeric: NumericClass) -> str:
    """A class in the words in which workers declare theirs."""
    return str(ClassInfo(one_line(numeric.name), numeric.accumulation, numeric.activations))


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

    def __init__(self, model: Judged) -> None:
        self.own_class = class_text(model.numeric_class)  #: the backbone's
        self._model, self._judges = model, iter(model.judges)
        self._known: dict[str, Backend] = {}  #: judges by class, of those that were asked for so far

    def rows(self, numeric_class: str, layer: int, expert: int, x: F32) -> F32 | None:
        """The rows [n, D] of a class for x [n, D], bit by bit; None where they cannot be computed here."""
        while numeric_class not in self._known and (each := next(self._judges, None)) is not None:
            self._known[class_text(each.numeric_class)] = each
        judge = self._known.get(numeric_class)
        if judge is None:
            return None
        pairs = np.stack([np.arange(len(x)), np.full(len(x), expert)], axis=1).astype(np.int32)
        try:
            return judge.load({expert: expert_of(self._model, layer, expert)}).rows(x, pairs)
        except KernelError as error:
            log.debug("expert %d of layer %d cannot be checked here: %s", expert, layer, error)
            return None
        finally:
            self._model.release(layer)

    def error(self, layer: int, expert: int, x: F32, rows: F32) -> float:
        """The largest relative L2 distance of rows [n, D] from the exact ones for x [n, D]."""
        return distance(rows, self.exact(layer, expert, x))

    def exact(self, layer: int, expert: int, x: F32) -> NDArray[np.float64]:
        """The rows [n, D] in float64 for x [n, D]. What overflows is as far off as can be."""
        try:
            with np.errstate(all="ignore"):
                return exact.expert_rows(expert_of(self._model, layer, expert), x)
        finally:
            self._model.release(layer)


def same_bits(a: F32, b: F32) -> bool:
    """Whether two arrays have the same shape and the same bits."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def differing(a: F32, b: F32) -> NDArray[np.intp]:
    """Which of the rows [n, D] of two arrays have other bits."""
    words = [np.ascontiguousarray(each).view(np.uint32) for each in (a, b)]
    return np.nonzero((words[0] != words[1]).any(axis=1))[0]


def distance(rows: F32, others: NDArray[np.floating]) -> float:
    """The largest relative L2 distance of rows [n, D] from others [n, D]; infinite where one is not finite.

    A row that should be zero counts by its own norm. As `exact.error_of`, without what that needs to be imported.
    """
    if not (np.isfinite(rows).all() and np.isfinite(others).all()):
        return math.inf
    wide = others.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    return float((np.linalg.norm(rows - wide, axis=1) / np.where(lengths > 0, lengths, 1)).max())
