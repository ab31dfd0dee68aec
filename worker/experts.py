"""The experts that a worker holds, within its memory budget: from the wire, or from its own copy of the model file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.errors import GGUFError
from kernels.formats import GGMLType, row_bytes
from kernels.gguf import GGUFFile
from kernels.interface import ExpertWeights
from kernels.matrix import Matrix
from kernels.reference import ACTIVATIONS
from protocol.messages import Assign, Slice

from .errors import WorkerError

U8 = NDArray[np.uint8]
PARTS = ("gate", "up", "down")
BIASES = ("gate_bias", "up_bias", "down_bias")


def slice_bytes(piece: Slice) -> int:
    """Bytes of a slice. WorkerError for a type or shape that cannot be."""
    try:
        size = piece.rows * row_bytes(GGMLType(piece.type_id), piece.cols)
    except ValueError as error:
        raise WorkerError(f"{piece.tensor}, expert {piece.expert}: {error}") from None
    if not size or piece.part not in (*PARTS, *BIASES):
        raise WorkerError(f"{piece.tensor}, expert {piece.expert}: {piece.part!r} of {piece.rows} x {piece.cols}")
    return size


@dataclass(slots=True)
class Holding:
    """A layer's experts of one assignment."""

    epoch: int
    experts: dict[int, ExpertWeights] = field(default_factory=dict)


class ExpertStore:
    """Experts by layer. Slices of the wire are kept by their sha256 until their layer is put together."""

    def __init__(self, *, memory_bytes: int, file: GGUFFile | None) -> None:
        self._memory_bytes, self._file = memory_bytes, file
        self._layers: dict[int, Holding] = {}
        self._pending: dict[bytes, U8] = {}
        self._got: dict[bytes, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all experts held."""
        return sum(e.nbytes for holding in self._layers.values() for e in holding.experts.values())

    def missing(self, assign: Assign) -> dict[bytes, int]:
        """Slices to fetch for an assignment, sha256 to bytes. WorkerError when it does not fit, with numbers."""
        sizes = [slice_bytes(piece) for piece in assign.slices]
        others = sum(e.nbytes for layer, h in self._layers.items() if layer != assign.layer for e in h.experts.values())
        if self._memory_bytes and others + sum(sizes) > self._memory_bytes:
            raise WorkerError(
                f"layer {assign.layer} needs {sum(sizes)} bytes beside {others} held; the limit is {self._memory_bytes}"
            )
        if assign.activation not in ACTIVATIONS:
            raise WorkerError(f"activation {assign.activation!r} is not known here; known are {', '.join(ACTIVATIONS)}")
        if self._file is not None:
            return {}
        for piece in assign.slices:
            if not piece.sha256:
                raise WorkerError(f"{piece.tensor}, expert {piece.expert}: no sha256, and no model file here")
        return {piece.sha256: size for piece, size in zip(assign.slices, sizes, strict=True)}

    def add_chunk(self, sha256: bytes, size: int, offset: int, data: U8) -> bool:
        """Put a chunk of a slice in its place; whether the slice is whole. WorkerError when its sha256 is another."""
        buffer = self._pending.setdefault(sha256, np.empty(size, np.uint8))
        if offset + len(data) > size:
            raise WorkerError(f"a chunk of {len(data)} bytes at {offset} of a slice of {size}")
        buffer[offset : offset + len(data)] = data
        self._got[sha256] = self._got.get(sha256, 0) + len(data)
        if self._got[sha256] < size:
            return False
        if hashlib.sha256(buffer.data).digest() != sha256:
            self.drop(sha256)
            raise WorkerError(f"slice {sha256.hex()[:12]} arrived with another sha256")
        buffer.flags.writeable = False
        return True

    def drop(self, sha256: bytes) -> None:
        """Forget a slice that is not whole or not right."""
        self._pending.pop(sha256, None)
        self._got.pop(sha256, None)

    def complete(self, assign: Assign) -> None:
        """Put a layer together of slices that are all here."""
        by_expert: dict[int, dict[str, Slice]] = {}
        for piece in assign.slices:
            by_expert.setdefault(piece.expert, {})[piece.part] = piece
        experts = {i: self._expert(i, pieces, assign.activation) for i, pieces in by_expert.items()}
        self._layers[assign.layer] = Holding(assign.epoch, experts)
        for piece in assign.slices:
            self.drop(piece.sha256)

    def _expert(self, index: int, pieces: Mapping[str, Slice], activation: str) -> ExpertWeights:
        if any(part not in pieces for part in PARTS):
            raise WorkerError(f"expert {index} comes without one of {', '.join(PARTS)}")
        gate, up, down = (self._matrix(pieces[part]) for part in PARTS)
        if (gate.rows, gate.cols) != (up.rows, up.cols) or down.cols != gate.rows:
            raise WorkerError(f"expert {index}: gate, up and down do not fit together")
        biases = {part: self._matrix(pieces[part]).vector() for part in BIASES if part in pieces}
        for part, bias in biases.items():
            if len(bias) != (down.rows if part == "down_bias" else gate.rows):
                raise WorkerError(f"expert {index}: {part} has {len(bias)} values")
        return ExpertWeights(gate=gate, up=up, down=down, activation=activation, **biases)

    def _matrix(self, piece: Slice) -> Matrix:
        return Matrix.of(GGMLType(piece.type_id), piece.rows, piece.cols, self._bytes(piece))

    def _bytes(self, piece: Slice) -> U8:
        if self._file is None:
            return self._pending[piece.sha256]
        info = self._file.tensors.get(piece.tensor)
        if info is None or int(info.type) != piece.type_id:
            raise GGUFError(f"{self._file.path}: no tensor {piece.tensor} of type {piece.type_id}")
        data, size = self._file.data(piece.tensor), slice_bytes(piece)
        if (piece.expert + 1) * size > len(data):
            raise GGUFError(f"{self._file.path}: {piece.tensor} has no expert {piece.expert} of {size} bytes")
        return data[piece.expert * size : (piece.expert + 1) * size]

    def find(self, epoch: int, layer: int) -> Mapping[int, ExpertWeights]:
        """A layer's experts. WorkerError when they are not here or of another epoch."""
        holding = self._layers.get(layer)
        if holding is None:
            raise WorkerError(f"no experts of layer {layer} here")
        if holding.epoch != epoch:
            raise WorkerError(f"layer {layer} is of epoch {holding.epoch} here, asked for is epoch {epoch}")
        return holding.experts
