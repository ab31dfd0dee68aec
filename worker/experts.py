"""The experts that a worker holds: bytes from the wire, or views of its own copy of the model file. Decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, islice

from kernels.errors import GGUFError
from kernels.formats import GGMLType, row_bytes
from kernels.gguf import GGUFFile
from kernels.interface import Backend, ExpertWeights
from kernels.matrix import Matrix
from kernels.reference import ACTIVATIONS
from protocol.messages import Assign, Slice

from .arrivals import Arrivals, Checked, Result
from .cache import SliceCache
from .compute import Layer
from .errors import WorkerError
from .mapping import U8

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


class ExpertStore:
    """Experts by layer, and slices by sha256, each kept once however many experts have it.

    A slice that has a sha256 is taken from wherever these bytes are found: this machine's copy of the model file, the
    cache, the wire. One without is a part of the file, which the backbone on this machine shares.
    """

    def __init__(self, backend: Backend, file: GGUFFile | None = None, cache: SliceCache | None = None) -> None:
        self._backend, self._file, self._cache = backend, file, cache
        self._layers: dict[int, Layer] = {}
        self._slices: dict[bytes, U8] = {}
        self._arrivals = Arrivals(cache)
        self._other = set[bytes]()  #: slices that the file here does not hold where their tensors are
        self.wake = self._arrivals.wake  #: readable when `results` has something

    @property
    def nbytes(self) -> int:
        """Bytes of all slices that are here or on their way."""
        return sum(len(data) for data in self._slices.values()) + self._arrivals.nbytes

    def close(self) -> None:
        """Let go of everything."""
        self._arrivals.close()

    def cached(self, most: int) -> tuple[bytes, ...]:
        """Slices that need not be sent, at most so many: those held here, then the cache's, the one used last first."""
        on_disk = self._cache.newest() if self._cache is not None else ()
        return tuple(islice(dict.fromkeys(chain(self._slices, on_disk)), most))

    def keep(self, slices: Collection[bytes], without: int | None) -> None:
        """Let go of all slices but these, and of a layer's experts where one is named."""
        if without is not None:
            self._layers.pop(without, None)
        self._slices = {sha256: data for sha256, data in self._slices.items() if sha256 in slices}
        self._arrivals.keep(slices)
        if self._cache is not None:
            self._cache.release(slices)

    # ---- slices

    def here(self, piece: Slice, size: int) -> int:
        """Bytes of a slice that are on this machine: all, the beginning, or none. All of them have yet to be hashed."""
        if piece.sha256 in self._slices or self._in_file(piece, size) is not None:
            return size
        if coming := self._arrivals.here(piece.sha256):
            return coming
        return 0 if self._cache is None else self._cache.here(piece.sha256, size)

    def check(self, piece: Slice, size: int) -> None:
        """Hash a slice that is all here; `results` tells."""
        if (held := self._slices.get(piece.sha256)) is not None:
            self._arrivals.tell(Checked(piece.sha256, held))
        elif (data := self._in_file(piece, size)) is not None:
            self._other.add(piece.sha256)  # until it is found right
            self._arrivals.check(piece.sha256, data)
        elif self._arrivals.here(piece.sha256) == size:
            return  # its last chunk came, and its result will
        elif self._cache is not None and (data := self._cache.open(piece.sha256, size)) is not None:
            self._arrivals.check(piece.sha256, data)
        else:
            self._arrivals.tell(Checked(piece.sha256, None))

    def add_chunk(self, sha256: bytes, size: int, offset: int, data: U8) -> None:
        """Put a chunk behind the bytes that are here of a slice; `results` tells when it was, and of the whole slice.

        WorkerError when it is not the next one, or there is no memory for the slice.
        """
        self._arrivals.add(sha256, size, offset, data)

    def results(self) -> list[Result]:
        """What became of chunks and checks since the last call."""
        found = self._arrivals.results()
        for result in found:
            if isinstance(result, Checked) and result.data is not None:
                self._slices[result.sha256] = result.data
                self._other.discard(result.sha256)
            elif isinstance(result, Checked) and self._cache is not None:
                self._cache.remove(result.sha256)
        return found

    def _in_file(self, piece: Slice, size: int) -> U8 | None:
        """Where the file here has a slice's tensor, its bytes; they may be another model's."""
        info = self._file.tensors.get(piece.tensor) if self._file is not None else None
        if self._file is None or info is None or int(info.type) != piece.type_id or piece.sha256 in self._other:
            return None
        data = self._file.data(piece.tensor)
        return data[piece.expert * size : (piece.expert + 1) * size] if (piece.expert + 1) * size <= len(data) else None

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
        if piece.sha256 or self._file is None:
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
