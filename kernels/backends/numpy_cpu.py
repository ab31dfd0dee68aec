"""The `numpy` backend: the reference. Slow, and the specification."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import reference
from ..interface import F32, ExpertWeights, NumericClass


def _cpu_model() -> str:
    """The CPU's name: BLAS and numpy choose their kernels by it, so it is a part of the class."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    features = "avx512" if "avx512f" in named.get("flags", "") else "avx2" if "avx2" in named.get("flags", "") else ""
    return " ".join(w for w in (named.get("model name", os.uname().machine), named.get("model", ""), features) if w)


def _blas_build() -> str:
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    core = os.environ.get("OPENBLAS_CORETYPE", "")
    return f"{blas.get('name', 'blas')}-{blas.get('version', '?')}{f'-{core}' if core else ''}"


class NumpyBackend:
    """Dequantises tile by tile and multiplies in float32, one row a product."""

    name = "numpy"
    threads = 1  #: whatever was asked for: a sum split over threads would have another order

    def __init__(self) -> None:
        self.device = _cpu_model()
        self.numeric_class = NumericClass(name=f"numpy-{np.__version__} {_blas_build()} {self.device}")

    def operation(self, name: str, constants: dict[str, Any]) -> Callable[..., Any]:
        """The reference's function with its constants fixed."""
        prepare = reference.PREPARED.get(name)
        return partial(reference.OPERATIONS[name], **(prepare(constants) if prepare else constants))

    def expert_rows(self, expert: ExpertWeights, x: F32) -> F32:
        """Unweighted output rows [n, D] float32 for x [n, D]."""
        # What overflows is not finite, and whoever takes the rows looks for that.
        with np.errstate(all="ignore"):
            return self._rows(expert, x)

    @staticmethod
    def _rows(expert: ExpertWeights, x: F32) -> F32:
        gate = reference.matmul(x, weight=expert.gate)
        up = reference.matmul(x, weight=expert.up)
        if expert.gate_bias is not None:
            gate += expert.gate_bias
        if expert.up_bias is not None:
            up += expert.up_bias
        down = reference.matmul(reference.ACTIVATIONS[expert.activation](gate) * up, weight=expert.down)
        return down if expert.down_bias is None else down + expert.down_bias
