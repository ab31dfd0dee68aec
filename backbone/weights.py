"""Experts' bytes as slices: what a worker is assigned, and what it may fetch. A slice is named by its sha256."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Fetch, Slice

from .model import Model


@dataclass(slots=True)
class SliceServer:
    """Names slices and serves their bytes, to each worker only those that it was assigned.

    With `share_path` the workers map the model file themselves: nothing is hashed and nothing served.
    """

    model: Model
    share_path: bool
    _data: dict[bytes, memoryview] = field(default_factory=dict)
    _granted: dict[str, set[bytes]] = field(default_factory=dict)

    def grant(self, worker: str, layer: int, experts: tuple[int, ...]) -> tuple[Slice, ...]:
        """The slices of some experts of a layer, which the worker may fetch from now on."""
        names = self.model.expert_tensors[layer]
        return tuple(self._slice(worker, part, names[part], expert) for expert in experts for part in names)

    def _slice(self, worker: str, part: str, tensor: str, expert: int) -> Slice:
        data = self.model.slice_data(tensor, expert)
        sha256 = b""
        if not self.share_path:
            sha256 = hashlib.sha256(data).digest()
            self._data[sha256] = data
            self._granted.setdefault(worker, set()).add(sha256)
        rows, cols = self.model.slice_shape(tensor)
        return Slice(expert, part, tensor, int(self.model.gguf.tensors[tensor].type), rows, cols, sha256)

    def read(self, worker: str, fetch: Fetch) -> Any | None:
        """The bytes that a worker asks for; None when it was not granted them or they do not exist."""
        if fetch.sha256 not in self._granted.get(worker, ()):
            return None
        data = self._data[fetch.sha256]
        if not fetch.length or fetch.offset + fetch.length > len(data):
            return None
        return data[fetch.offset : fetch.offset + fetch.length]


def expert_bytes(model: Model) -> Mapping[int, list[int]]:
    """Layer to the bytes of each of its experts, for placement."""
    return {
        layer: [
            sum(len(model.slice_data(tensor, e)) for tensor in names.values()) for e in range(model.expert_count(layer))
        ]
        for layer, names in model.expert_tensors.items()
    }
