"""Memory that C reads and writes: arrays on cache lines, and the keys and values of a sequence.

Legend: K kv heads, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .structs import CCache

BLOCK = 256  #: positions by which a cache grows


def aligned(count: int, dtype: Any = np.float32) -> NDArray[Any]:
    """`count` values that begin on a cache line, with a line to spare behind them, for reads of whole registers."""
    size = np.dtype(dtype).itemsize
    raw = np.empty(count * size + 384, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + count * size].view(dtype)


def address(array: NDArray[Any]) -> int:
    """Where an array's first value is. (`__array_interface__` says so too, and interns strings each time: the process's
    table of those grows by it.)
    """
    found: int = array.ctypes.data
    return found


def filled(width: int) -> int:
    """A row's values with the zeros that fill up its last 32 lanes."""
    return -(-width // 32) * 32


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Of one attention step: kv heads, values of a key and of a value, each filled up to whole lanes."""

    kv_heads: int
    key_width: int
    value_width: int


class Caches:
    """Keys and values of every attention step for one sequence, [K, capacity, width] each, F32 or F16."""

    def __init__(self, shapes: Seq[CacheShape], *, half: bool = False) -> None:
        self._shapes, self._dtype = shapes, np.float16 if half else np.float32
        self._arrays: list[tuple[NDArray[Any], NDArray[Any]]] = [(aligned(0), aligned(0))] * len(shapes)
        self.table = (CCache * max(1, len(shapes)))()
        self.length = self._capacity = 0

    def reserve(self, first: int, length: int) -> None:
        """Room for positions up to `length`, of which `first` is the next one. ValueError when another is next."""
        if first != self.length:
            raise ValueError(f"position {first} does not follow the {self.length} that are cached")
        if length > self._capacity:
            # By half as much again: growing block by block would copy a long context over and over.
            capacity = -(-max(length, self._capacity * 3 // 2) // BLOCK) * BLOCK
            self._arrays = [self._grown(i, capacity) for i in range(len(self._shapes))]
            self._capacity = capacity
        self.length = length

    def _grown(self, i: int, capacity: int) -> tuple[NDArray[Any], NDArray[Any]]:
        shape, grown = self._shapes[i], list[NDArray[Any]]()
        for old, width in zip(self._arrays[i], (shape.key_width, shape.value_width), strict=True):
            new = aligned(shape.kv_heads * capacity * width, self._dtype)
            if self._capacity:
                was = old.reshape(shape.kv_heads, self._capacity, width)[:, : self.length]
                new.reshape(shape.kv_heads, capacity, width)[:, : self.length] = was
            grown.append(new)
        self.table[i] = CCache(address(grown[0]), address(grown[1]), capacity)
        return grown[0], grown[1]

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        self.length = min(self.length, length)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._arrays)
