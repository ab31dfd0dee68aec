"""Experts' bytes as slices: what a worker is assigned, and what it may fetch. A slice is named by its sha256."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kernels.formats import GGMLType
from protocol.messages import Fetch, Slice

from .slice_digests import SliceDigests


class ExpertStore(Protocol):
    """Whoever has all experts' bytes: the bound model."""

    @property
    def path(self) -> Path:
        """The model file, for workers that may map it themselves."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The model's files."""

    @property
    def expert_tensors(self) -> Mapping[int, Mapping[str, str]]:
        """For each layer with experts: part (gate, up, down, biases) to the tensor's name."""

    def expert_count(self, layer: int) -> int:
        """Experts of a layer."""

    def expert_width(self, layer: int) -> int:
        """Values in an expert's output row."""

    def activation(self, layer: int) -> str:
        """The word of a layer's experts."""

    def slice_data(self, tensor: str, expert: int) -> memoryview:
        """One expert's bytes of a tensor."""

    def release(self, layer: int) -> None:
        """Take a layer's experts out of this process's memory, until they are read again."""

    def slice_shape(self, tensor: str) -> tuple[int, int]:
        """Rows and columns of one expert's part of a tensor; a bias is one row."""

    def slice_type(self, tensor: str) -> GGMLType:
        """The quant type of a tensor."""


@dataclass(slots=True)
class SliceServer:
    """Names slices and serves their bytes, to each worker only those that it was assigned.

    With `share_path` local workers map the model file themselves: for them nothing is hashed and nothing served.
    """

    store: ExpertStore
    share_path: bool
    digests: SliceDigests
    _data: dict[bytes, memoryview] = field(default_factory=dict)
    _granted: dict[str, set[bytes]] = field(default_factory=dict)

    def grant(self, worker: str, layer: int, experts: Sequence[int], *, by_path: bool) -> tuple[Slice, ...]:
        """The slices of some experts of a layer, which the worker may fetch from now on.

        `by_path`: where paths are shared, this worker has the file.
        """
        names, is_mapped = self.store.expert_tensors[layer], by_path and self.share_path
        return tuple(self._slice(worker, part, names[part], e, is_mapped) for e in experts for part in names)

    def _slice(self, worker: str, part: str, tensor: str, expert: int, is_mapped: bool) -> Slice:
        sha256 = b"" if is_mapped else self._hash(tensor, expert)
        if sha256:
            self._granted.setdefault(worker, set()).add(sha256)
        rows, cols = self.store.slice_shape(tensor)
        return Slice(expert, part, tensor, int(self.store.slice_type(tensor)), rows, cols, sha256)

    def _hash(self, tensor: str, expert: int) -> bytes:
        sha256 = self.digests.of(tensor, expert)
        if sha256 not in self._data:
            self._data[sha256] = self.store.slice_data(tensor, expert)
        return sha256

    def forget(self, worker: str) -> None:
        """A worker may fetch nothing any more, until it is granted slices again."""
        self._granted.pop(worker, None)

    def read(self, worker: str, fetch: Fetch) -> memoryview | None:
        """The bytes that a worker asks for; None when it was not granted them or they do not exist."""
        if fetch.sha256 not in self._granted.get(worker, ()):
            return None
        data = self._data[fetch.sha256]
        if not fetch.length or fetch.offset + fetch.length > len(data):
            return None
        return data[fetch.offset : fetch.offset + fetch.length]


class ExpertSizes(Protocol):
    """Whoever knows how large experts are."""

    @property
    def expert_tensors(self) -> Mapping[int, Mapping[str, str]]:
        """For each layer with experts: part to the tensor's name."""

    def expert_count(self, layer: int) -> int:
        """Experts of a layer."""

    def slice_data(self, tensor: str, expert: int) -> memoryview:
        """One expert's bytes of a tensor."""


def expert_bytes(store: ExpertSizes) -> Mapping[int, list[int]]:
    """Layer to the bytes of each of its experts, for placement. A layer's experts are all of one size."""
    return {
        layer: [sum(len(store.slice_data(tensor, 0)) for tensor in names.values())] * store.expert_count(layer)
        for layer, names in store.expert_tensors.items()
    }
