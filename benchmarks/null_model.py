"""A layer of experts that cost nothing to compute: what is left is the swarm. For scripts that time it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from kernels.formats import GGMLType
from kernels.interface import F32, I32, ExpertWeights, NumericClass

WIDTH = 2048  #: of a row
PARTS = ("gate", "up", "down")
MOST_ROWS = 64


class NullBackend:
    """Takes experts, and gives rows of zeros."""

    name, device, numeric_class, threads, memory_bytes = "null", "none", NumericClass(name="null"), 1, 0

    def __init__(self) -> None:
        self._zeros = np.zeros((MOST_ROWS, WIDTH), np.float32)

    def load(self, experts: Mapping[int, ExpertWeights]) -> NullBackend:
        return self

    def rows(self, x: F32, pairs: I32) -> F32:
        return self._zeros[: len(pairs)]


class OneLayer:
    """What a swarm asks of a model: one layer of `experts` with matrices [inner, WIDTH], in F32."""

    path = Path("none")
    paths = (path,)
    numeric_class, judges = NullBackend.numeric_class, ()
    expert_tensors: ClassVar = {0: {part: part for part in PARTS}}

    def __init__(self, experts: int, inner: int) -> None:
        draw, self._experts, self._inner = np.random.default_rng(1), experts, inner
        self._data = {part: draw.standard_normal((experts, inner * WIDTH), np.float32) for part in PARTS}

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self._data.values())

    def expert_count(self, layer: int) -> int:
        return self._experts

    def expert_width(self, layer: int) -> int:
        return WIDTH

    def activation(self, layer: int) -> str:
        return "silu"

    def slice_data(self, tensor: str, expert: int) -> memoryview:
        return memoryview(self._data[tensor][expert]).cast("B")

    def slice_shape(self, tensor: str) -> tuple[int, int]:
        return (WIDTH, self._inner) if tensor == "down" else (self._inner, WIDTH)

    def slice_type(self, tensor: str) -> GGMLType:
        return GGMLType.F32

    def release(self, layer: int) -> None:
        """Nothing is mapped."""

    def rows(self, layer: int, expert: int, x: F32) -> F32:
        raise SystemExit("a worker was lost: the figures would mean nothing")
