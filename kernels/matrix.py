"""A quantised matrix in place: bytes from a mapped file or from the wire, dequantised tile by tile.

Tiles depend on the matrix's shape alone, never on how many rows are multiplied, so that a product has the same
bits whoever computes it and in whatever batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .formats import GGMLType, row_bytes
from .quants import dequantise

TILE_BYTES = 1 << 20  #: of dequantised F32: a tile stays in a core's second-level cache


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """`rows` outputs of `cols` inputs each; `data` is a read-only uint8 view [rows, bytes of a row]."""

    type: GGMLType
    rows: int
    cols: int
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, type: GGMLType, rows: int, cols: int, data: NDArray[np.uint8]) -> Matrix:  # noqa: A002
        """View flat bytes as a matrix. ValueError when the byte count is not that of the shape."""
        size = row_bytes(type, cols)
        if data.size != rows * size:
            raise ValueError(f"{data.size} bytes for a {type.name} matrix {rows} x {cols} of {rows * size} bytes")
        return cls(type, rows, cols, data.reshape(rows, size))

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised weights."""
        return int(self.data.nbytes)

    def take(self, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Chosen rows dequantised [len(rows), cols] float32: what `embed` needs, and nothing else is read."""
        return dequantise(self.type, self.data[rows])

    def vector(self) -> NDArray[np.float32]:
        """All values in one float32 row, for norms and biases. A copy: it is read often and small."""
        return dequantise(self.type, self.data).reshape(-1).copy()

    def tiles(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """The whole matrix as (rows, float32 [rows of the tile, cols]), about 1 MiB each, in order."""
        step = max(1, TILE_BYTES // (4 * self.cols))
        for start in range(0, self.rows, step):
            part = slice(start, min(start + step, self.rows))
            yield part, dequantise(self.type, self.data[part])
