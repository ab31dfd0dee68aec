"""Keys and values of a sequence on a device, [kv heads, capacity, width] for each attention step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ..steps import Attention
from .interface import Buffer
from .kernels import Kernels

BLOCK = 256  #: positions by which a cache grows


class DeviceCaches:
    """Keys and values of every attention step for one sequence, F32."""

    def __init__(self, kernels: Kernels, shapes: Seq[Attention]) -> None:
        self._kernels, self._shapes = kernels, shapes
        self._buffers: list[tuple[Buffer, Buffer]] = []
        self.length = self.capacity = 0

    def of(self, memory: int) -> tuple[Buffer, Buffer]:
        """Keys and values of an attention step."""
        return self._buffers[memory]

    def reserve(self, first: int, length: int) -> None:
        """Room for positions up to `length`, of which `first` is the next one. ValueError when another is next."""
        if first != self.length:
            raise ValueError(f"position {first} does not follow the {self.length} that are cached")
        if length > self.capacity:
            # By half as much again: growing block by block would copy a long context over and over.
            capacity = -(-max(length, self.capacity * 3 // 2) // BLOCK) * BLOCK
            for i, shape in enumerate(self._shapes):
                grown = self._grown(i, shape, capacity)
                if i < len(self._buffers):
                    self._buffers[i] = grown
                else:
                    self._buffers.append(grown)
            self.capacity = capacity
        self.length = length

    def _grown(self, i: int, shape: Attention, capacity: int) -> tuple[Buffer, Buffer]:
        grown = list[Buffer]()
        for part, width in enumerate((shape.width, shape.value_width)):
            new = self._kernels.device.alloc(4 * shape.kv_heads * capacity * width)
            if self.length:
                strides = capacity * width, self.capacity * width
                self._kernels.regrow(new, self._buffers[i][part], shape.kv_heads, self.length * width, *strides)
            grown.append(new)
        return grown[0], grown[1]

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        self.length = min(self.length, length)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(4 * s.kv_heads * self.capacity * (s.width + s.value_width) for s in self._shapes)
