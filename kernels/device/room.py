"""Scratch memory on a device, by name; it grows and is used again, since launches run one after the other."""

from __future__ import annotations

from .interface import Buffer, Device


class Room:
    """Buffers that hold nothing between two uses."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[str, tuple[int, Buffer]] = {}

    def of(self, name: str, nbytes: int) -> Buffer:
        """A buffer of at least so many bytes. What it held is lost when it has to grow."""
        size, buffer = self._buffers.get(name, (0, None))
        if size < nbytes:
            self._buffers.pop(name, None)
            buffer = None  # given back before the greater one is asked for
            size = max(256, nbytes)
            buffer = self._device.alloc(size)
            self._buffers[name] = size, buffer
        return buffer
