"""The `numpy` backend: the reference. Slow, and the specification."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import reference
from ..interface import F32, I32, ExpertWeights, NumericClass, Operation, one_shape
from ..interpreter import Interpreter
from .cpu import cpu_fields, cpu_model


def _cpu() -> str:
    """The CPU's name and kind: BLAS and numpy choose their kernels by it, so it is a part of the class."""
    fields = cpu_fields()
    features = "avx512" if "avx512f" in fields.get("flags", "") else "avx2" if "avx2" in fields.get("flags", "") else ""
    return " ".join(word for word in (cpu_model(), fields.get("model", ""), features) if word)


def _blas_build() -> str:
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    core = os.environ.get("OPENBLAS_CORETYPE", "")
    return f"{blas.get('name', 'blas')}-{blas.get('version', '?')}{f'-{core}' if core else ''}"


class NumpyBackend:
    """Dequantises tile by tile and multiplies in float32, one row a product."""

    name = "numpy"
    memory_bytes = 0
    threads = 1  #: whatever was asked for: a sum split over threads would have another order

    def __init__(self) -> None:
        self.device = _cpu()
        self.numeric_class = NumericClass(name=f"numpy-{np.__version__} {_blas_build()} {self.device}")

    def program(self, operations: Sequence[Operation], slot_widths: Sequence[int]) -> Interpreter:
        """The reference's functions, one after the other."""
        return Interpreter(operations, slot_widths)

    def load(self, experts: Mapping[int, ExpertWeights]) -> NumpyBank:
        """Experts where they are."""
        one_shape(experts.values())
        return NumpyBank(experts)


class NumpyBank:
    """Experts of one layer."""

    def __init__(self, experts: Mapping[int, ExpertWeights]) -> None:
        self._experts = experts

    def rows(self, x: F32, pairs: I32) -> F32:
        """Unweighted rows [P, width] float32 for pairs [P, 2] of (row of x [R, D], expert)."""
        out: F32 | None = None
        # What overflows is not finite, and whoever takes the rows looks for that.
        with np.errstate(all="ignore"):
            for expert in np.unique(pairs[:, 1]):
                places = np.nonzero(pairs[:, 1] == expert)[0]
                rows = reference.expert_rows(self._experts[int(expert)], x[pairs[places, 0]])
                if out is None:
                    out = np.empty((len(pairs), rows.shape[1]), np.float32)
                out[places] = rows
        return np.empty((0, 0), np.float32) if out is None else out
