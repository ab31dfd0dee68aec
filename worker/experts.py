"""The experts that a worker holds: bytes from the wire, or views of its own copy of the model file. Decides nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.errors import GGUFError
from kernels.formats import GGMLType, row_bytes
from kernels.gguf import GGUFFile
from kernels.interface import Backend, ExpertWeights
from kernels.matrix import Matrix
from kernels.reference import ACTIVATIONS
from protocol.messages import Assign, Slice

from .compute import Layer
from .errors import WorkerError

U8 = NDArray[np.uint8]
PARTS = ("gate", "up", "down")
BIASES = ("gate_bias", "up_bias", "down_bias")


def slice_bytes(piece: Slice) -> int:
    """Bytes of a slice. WorkerError for a type or shape that cannot be."""
    where = f"{piece.tensor}, expert {piece.expert}"
    if piece.part not in (*PARTS, *BIASES) or not piece.rows or not piece.cols:
        raise WorkerError(f"{where}: {piece.part!r} of {piece.rows} x {piece.cols} is no part of an expert")
    try:
        return piece.rows * row_bytes(GGMLType(piece.type_id), piece.cols)
    except ValueError as error:
        raise WorkerError(f"{where}: {error}") from None


@dataclass(slots=True)
class _Arriving:
    """A slice on its way: its first `done` bytes are here and hashed."""

    data: U8
    done: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)


class ExpertStore:
    """Experts by layer, and slices by sha256, each kept once however many experts have it."""

    def __init__(self, backend: Backend, file: GGUFFile | None = None) -> None:
        self._backend, self._file = backend, file
        self._layers: dict[int, Layer] = {}
        self._slices: dict[bytes, U8] = {}
        self._arriving: dict[bytes, _Arriving] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slices that came over the wire and are kept."""
        return sum(len(data) for data in self._slices.values()) + sum(len(a.data) for a in self._arriving.values())

    def keep(self, slices: Collection[bytes], without: int) -> None:
        """Let go of a layer's experts and of all slices but these."""
        self._layers.pop(without, None)
        self._slices = {sha256: data for sha256, data in self._slices.items() if sha256 in slices}
        self._arriving = {sha256: arriving for sha256, arriving in self._arriving.items() if sha256 in slices}

    def add_chunk(self, sha256: bytes, size: int, offset: int, data: U8) -> bool | None:
        """Put a chunk behind the bytes that are here of a slice. None: more to come; else whether its sha256 is right.

        WorkerError when it is not the next one, or there is no memory for the slice.
        """
        try:
            arriving = self._arriving.get(sha256) or _Arriving(np.empty(size, np.uint8))
        except MemoryError:
            raise WorkerError(f"no memory for a slice of {size} bytes; give this worker less with --memory") from None
        if offset != arriving.done or offset + len(data) > size:
            raise WorkerError(f"a chunk of {len(data)} bytes at {offset}; {arriving.done} of {size} are here")
        self._arriving[sha256] = arriving
        arriving.data[offset : offset + len(data)] = data
        arriving.sha256.update(data)
        arriving.done += len(data)
        if arriving.done < size:
            return None
        del self._arriving[sha256]
        if arriving.sha256.digest() != sha256:
            return False
        arriving.data.flags.writeable = False
        self._slices[sha256] = arriving.data
        return True

    def load(self, assign: Assign) -> None:
        """Put a layer's experts together of slices that are here. WorkerError when they do not make experts."""
        by_expert: dict[int, dict[str, Slice]] = {}
        for piece in assign.slices:
            by_expert.setdefault(piece.expert, {})[piece.part] = piece
        if assign.activation not in ACTIVATIONS:
            raise WorkerError(f"activation {assign.activation!r} is not known here; known are {', '.join(ACTIVATIONS)}")
        try:
            experts = {i: self._expert(pieces, assign.activation) for i, pieces in by_expert.items()}
        except (ValueError, GGUFError) as error:
            raise WorkerError(f"layer {assign.layer}: {error}") from None
        self._layers[assign.layer] = Layer(self._backend, experts)

    def _expert(self, pieces: Mapping[str, Slice], activation: str) -> ExpertWeights:
        if any(part not in pieces for part in PARTS):
            raise ValueError(f"an expert without one of {', '.join(PARTS)}")
        gate, up, down = (self._matrix(pieces[part]) for part in PARTS)
        if (gate.rows, gate.cols) != (up.rows, up.cols) or down.cols != gate.rows:
            shapes = ", ".join(f"{m.rows} x {m.cols}" for m in (gate, up, down))
            raise ValueError(f"expert {pieces['gate'].expert}: gate, up and down do not fit together: {shapes}")
        biases = {part: self._matrix(pieces[part]).vector() for part in BIASES if part in pieces}
        for part, bias in biases.items():
            if len(bias) != (wanted := down.rows if part == "down_bias" else gate.rows):
                raise ValueError(f"expert {pieces[part].expert}: {part} has {len(bias)} values, not {wanted}")
        return ExpertWeights(gate=gate, up=up, down=down, activation=activation, **biases)

    def _matrix(self, piece: Slice) -> Matrix:
        return Matrix.of(GGMLType(piece.type_id), piece.rows, piece.cols, self._bytes(piece))

    def _bytes(self, piece: Slice) -> U8:
        if self._file is None:
            return self._slices[piece.sha256]
        info = self._file.tensors.get(piece.tensor)
        if info is None or int(info.type) != piece.type_id:
            raise ValueError(f"{self._file.path}: no tensor {piece.tensor} of type {piece.type_id}")
        data, size = self._file.data(piece.tensor), slice_bytes(piece)
        if (piece.expert + 1) * size > len(data):
            raise ValueError(f"{self._file.path}: {piece.tensor} has no expert {piece.expert} of {size} bytes")
        return data[piece.expert * size : (piece.expert + 1) * size]

    def layer(self, layer: int) -> Layer:
        """A layer's experts."""
        return self._layers[layer]
