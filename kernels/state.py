"""What rows carry: token, sequence, position; and what a sequence remembers, which is no batch's.

Legend: T rows, P positions, K kv heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
BLOCK = 256  #: positions by which a cache grows


class KeyValues:
    """Keys and values of one attention step and one sequence, in order of position."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: F32 | None = None  # [K, capacity, D]
        self._values: F32 | None = None

    def append(self, position: int, key: F32, value: F32) -> None:
        """Keep key [K, D] and value [K, Dv] of the next position. ValueError when another position is next."""
        if position != self.length:
            raise ValueError(f"position {position} does not follow the {self.length} that are cached")
        self._keys = _room(self._keys, self.length, key)
        self._values = _room(self._values, self.length, value)
        self._keys[:, position] = key
        self._values[:, position] = value
        self.length += 1

    def window(self, start: int, stop: int) -> tuple[F32, F32]:
        """Keys [K, stop - start, D] and values likewise, views of the cache."""
        if self._keys is None or self._values is None:
            raise ValueError("nothing is cached yet")
        return self._keys[:, start:stop], self._values[:, start:stop]

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        self.length = min(self.length, length)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(a.nbytes for a in (self._keys, self._values) if a is not None)


def _room(cache: F32 | None, length: int, row: F32) -> F32:
    if cache is None:
        return np.empty((row.shape[0], BLOCK, row.shape[1]), row.dtype)
    if length < cache.shape[1]:
        return cache
    # By half as much again: growing block by block would copy a long context over and over.
    extent = (length * 3 // 2 // BLOCK + 1) * BLOCK
    grown = np.empty((cache.shape[0], extent, cache.shape[2]), cache.dtype)
    grown[:, :length] = cache
    return grown


class Memory(Protocol):
    """What steps of a program remember of a sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""


class Sequence:
    """One text in the making: its memories, as the backend keeps them, and the tokens they hold."""

    def __init__(self, memories: tuple[Memory, ...]) -> None:
        self.memories = memories
        self.tokens: list[int] = []

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.tokens[length:]
        for memory in self.memories:
            memory.truncate(length)

    @property
    def nbytes(self) -> int:
        """Bytes of all memories."""
        return sum(m.nbytes for m in self.memories)


@dataclass(slots=True, eq=False)
class Taps:
    """What a run gives out when asked: per layer routing, scores and residuals, of all rows in order."""

    ids: dict[int, list[NDArray[np.int32]]] = field(default_factory=dict)  # layer: [T, k]
    scores: dict[int, list[F32]] = field(default_factory=dict)  # layer: [T, E], what top_k chose by
    residuals: dict[int, list[F32]] = field(default_factory=dict)  # layer: [T, width]


@dataclass(slots=True, eq=False)
class Rows:
    """A batch of rows; each belongs to a sequence at a position, whatever else is in the batch."""

    tokens: NDArray[np.int32]  # [T]
    positions: NDArray[np.int64]  # [T]
    sequences: list[Sequence]  # [T]
    wanted: NDArray[np.intp]  # rows whose logits are wanted, ascending
    taps: Taps | None = None
    given_ids: dict[int, NDArray[np.int32]] | None = None  #: layer: [T, k], in place of top_k's own choice

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What top_k gives: expert ids [T, k] int32 in descending order of score, and their weights [T, k] float32."""

    ids: NDArray[np.int32]
    weights: F32

    def weighted(self, weights: Any) -> Chosen:
        """The same ids with other weights."""
        return Chosen(self.ids, weights)
