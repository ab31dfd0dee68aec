"""A compute device as the host side sees it: memory, programs, launches. Eight calls, which each driver binds.

Nothing here knows what is computed. Calls of one device are made by one thread, and run in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError

#: What a driver gives out for memory and for a built source; only the driver that made it looks inside.
Buffer = Any
Module = Any
#: An argument of a kernel: memory, a 32-bit integer or a float.
Arg = Buffer | np.int32 | np.float32


class DeviceError(KernelError):
    """A device that failed: one line that names it and says what happened."""


class DeviceMemoryError(DeviceError):
    """The device has no memory for what was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is, and what its arithmetic keeps to."""

    name: str  #: as a person would name it
    driver: str  #: with its version
    memory_bytes: int  #: of the device, as its driver says
    largest_buffer: int  #: bytes of one buffer
    work_group: int  #: most work items of one group
    divides_exactly: bool  #: division and square root of F32 are correctly rounded, as `build` compiles them
    keeps_subnormals: bool  #: F32 numbers below 2^-126 are not flushed to zero
    has_f16: bool  #: arithmetic of F16: FMA that rounds once


class Device(Protocol):
    """One device. Whatever goes wrong is a DeviceError (or DeviceMemoryError) that names the device."""

    @property
    def info(self) -> DeviceInfo:
        """What it is."""

    def alloc(self, nbytes: int) -> Buffer:
        """Memory for so many bytes, at least one; aligned to 16. What it holds is undefined."""

    def free(self, buffer: Buffer) -> None:
        """Give memory back, once what was launched with it is done."""

    def write(self, buffer: Buffer, data: NDArray[Any], offset: int = 0) -> None:
        """Copy a contiguous array to a buffer, `offset` bytes behind its start. `data` may change on return."""

    def read(self, buffer: Buffer, out: NDArray[Any], offset: int = 0) -> None:
        """Fill a contiguous array from a buffer, after all that was launched before."""

    def build(self, source: str, defines: Mapping[str, str]) -> Module:
        """Compile a source for this device: no contraction, no fast arithmetic. `defines` as by -D NAME=VALUE."""

    def launch(self, module: Module, kernel: str, groups: tuple[int, int], items: int, args: Sequence[Arg]) -> None:
        """Start a kernel in a grid of groups [x, y] of so many work items each. Does not wait."""

    def wait(self) -> None:
        """Return when all that was launched is done."""
