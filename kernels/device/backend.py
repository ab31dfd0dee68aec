"""The host side of every device: experts resident, the dense path, and the numeric class by what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ..errors import BackendUnavailable
from ..interface import ExpertWeights, NumericClass, Operation, Options
from .bank import DeviceBank
from .interface import Device, DeviceError
from .kernels import Kernels
from .probe import is_canonical
from .program import DeviceProgram
from .room import Room


class DeviceBackend:
    """The device source on one device."""

    threads = 1  #: of this process: the device has its own

    def __init__(self, name: str, device: Device, options: Options) -> None:
        """BackendUnavailable when the device does not compute as asked."""
        if options.activations != "f32":
            raise BackendUnavailable(
                f"{name} computes with f32 activations only; {options.activations} needs --backend native"
            )
        if options.kv_cache != "f32":
            raise BackendUnavailable(f"{name} keeps keys and values in f32; {options.kv_cache} needs --backend native")
        info = device.info
        self.device = f"{info.name} ({info.driver})"
        self.memory_bytes = info.memory_bytes * 9 // 10  # the rest is for rows on their way, and for the driver
        try:
            self.name, self._kernels, self._room = name, Kernels(device), Room(device)
            canonical = is_canonical(self._kernels, self._room)
        except DeviceError as error:
            raise BackendUnavailable(f"{name}: {error}") from None
        # A device that flushes small numbers, or whose compiler has ideas of its own, has a class of its own.
        self.numeric_class = NumericClass(name="canonical-1" if canonical else f"{name} {self.device}")

    def program(self, operations: Seq[Operation], slot_widths: Seq[int]) -> DeviceProgram:
        """Bind a whole program; its tensors go to the device."""
        return DeviceProgram(self._kernels, self._room, operations, slot_widths)

    def load(self, experts: Mapping[int, ExpertWeights]) -> DeviceBank:
        """Experts of one layer, resident. DeviceMemoryError with numbers when they do not fit."""
        return DeviceBank(self.name, self._kernels, self._room, experts)
