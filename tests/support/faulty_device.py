"""A device with something wrong, for tests: faults at the device interface, over a real device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.device.interface import Arg, Buffer, Device, DeviceError, DeviceInfo, DeviceMemoryError, Module


class FaultyDevice:
    """Launches fail from the n-th on (`launch`), reads give NaN (`nan`), memory ends (`memory`: bytes that there are).

    `gone`: from the n-th launch on, every call fails, as when a device is unplugged. All counts begin with `arm`.
    """

    def __init__(self, inner: Device, *, launch: int = -1, gone: int = -1, memory: int = -1, nan: int = -1) -> None:
        self._inner, self._launch, self._gone, self._memory, self._nan = inner, launch, gone, memory, nan
        self.launches = self.allocated = 0
        self._is_armed = False

    def arm(self) -> None:
        """From now on it fails; what it did before does not count."""
        self._is_armed, self.launches, self.allocated = True, 0, 0

    def _is_due(self, fault: int) -> bool:
        return self._is_armed and 0 <= fault <= self.launches

    @property
    def info(self) -> DeviceInfo:
        return self._inner.info

    def _is_there(self, doing: str) -> None:
        if self._is_due(self._gone):
            raise DeviceError(f"{self.info.name}: {doing}: CL_DEVICE_NOT_AVAILABLE")

    def alloc(self, nbytes: int) -> Buffer:
        self._is_there("alloc")
        if self._is_armed and 0 <= self._memory < self.allocated + nbytes:
            raise DeviceMemoryError(
                f"{self.info.name}: no memory for {nbytes} bytes: {self.allocated} of {self._memory}"
            )
        self.allocated += nbytes
        return self._inner.alloc(nbytes)

    def free(self, buffer: Buffer) -> None:
        self._inner.free(buffer)

    def write(self, buffer: Buffer, data: NDArray[Any], offset: int = 0) -> None:
        self._is_there("write")
        self._inner.write(buffer, data, offset)

    def read(self, buffer: Buffer, out: NDArray[Any], offset: int = 0) -> None:
        self._is_there("read")
        self._inner.read(buffer, out, offset)
        if self._is_due(self._nan) and out.dtype == np.float32:
            out[...] = np.nan

    def build(self, source: str, defines: Mapping[str, str]) -> Module:
        self._is_there("build")
        return self._inner.build(source, defines)

    def launch(self, module: Module, kernel: str, groups: tuple[int, int], items: int, args: Sequence[Arg]) -> None:
        self._is_there(kernel)
        self.launches += 1
        if self._is_due(self._launch):
            raise DeviceError(f"{self.info.name}: {kernel}: CL_OUT_OF_RESOURCES")
        self._inner.launch(module, kernel, groups, items, args)

    def wait(self) -> None:
        self._is_there("wait")
        self._inner.wait()
