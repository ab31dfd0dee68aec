"""What the drivers do alike: memory is counted, copies and launches stay inside it, every error names the device.

A driver binds the `_` methods; it is called with what exists and fits, and raises DeviceError by `_error`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .interface import Arg, Buffer, DeviceError, DeviceInfo, DeviceMemoryError, Module


@dataclass(eq=False, slots=True, weakref_slot=True)
class Memory:
    """Memory of one device; it goes back to it when nothing refers to this any more, if not before."""

    handle: Any
    nbytes: int
    device: Driver
    give_back: weakref.finalize[Any, Any] | None = None


@dataclass(eq=False, slots=True)
class Built:
    """A source as one device has it; each kernel is made once, and kept with its number of arguments."""

    program: Any
    device: Driver
    kernels: dict[str, tuple[Any, int | None]] = field(default_factory=dict)


class Driver(ABC):
    """A Device over what a driver can do."""

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info
        self.allocated = 0  #: bytes given out

    @property
    def info(self) -> DeviceInfo:
        """What it is."""
        return self._info

    def alloc(self, nbytes: int) -> Buffer:
        """See Device. Refused beyond the device's memory, also where its driver would only fail at first use."""
        if nbytes < 1:
            raise self._error(f"alloc: a buffer of {nbytes} bytes")
        if nbytes > self.info.largest_buffer or self.allocated + nbytes > self.info.memory_bytes:
            raise self._no_memory(nbytes, "")
        memory = Memory(self._alloc(nbytes), nbytes, self)
        self.allocated += nbytes
        memory.give_back = weakref.finalize(memory, self._give_back, memory.handle, nbytes)
        memory.give_back.atexit = False  # the process's end frees it all, and a driver may be gone by then
        return memory

    def _give_back(self, handle: Any, nbytes: int) -> None:
        self.allocated -= nbytes
        self._free(handle)

    def free(self, buffer: Buffer) -> None:
        """See Device. A buffer is freed once."""
        self._handle("free", buffer)
        buffer.give_back()

    def write(self, buffer: Buffer, data: NDArray[Any], offset: int = 0) -> None:
        """See Device."""
        handle = self._inside("write", buffer, data, offset)
        if data.nbytes:
            self._write(handle, data, offset)

    def read(self, buffer: Buffer, out: NDArray[Any], offset: int = 0) -> None:
        """See Device."""
        handle = self._inside("read", buffer, out, offset)
        if not out.flags.writeable:
            raise self._error("read: the array cannot be written to")
        if out.nbytes:
            self._read(handle, out, offset)

    def build(self, source: str, defines: Mapping[str, str]) -> Module:
        """See Device. EXACT_DIVIDE=1 is defined where the device divides exactly."""
        if self.info.divides_exactly:
            defines = {**defines, "EXACT_DIVIDE": "1"}
        return Built(self._build(source, defines), self)

    def launch(self, module: Module, kernel: str, groups: tuple[int, int], items: int, args: Sequence[Arg]) -> None:
        """See Device."""
        found = module.kernels.get(kernel)
        if found is None:
            if module.device is not self:
                raise self._error(f"{kernel}: was built for {module.device.info.name}")
            found = module.kernels[kernel] = self._kernel(module.program, kernel)
        handle, count = found
        if count not in (None, len(args)):
            raise self._error(f"{kernel}: {len(args)} arguments, it takes {count}")
        if min(groups) < 1 or not 1 <= items <= self.info.work_group:
            raise self._error(
                f"{kernel}: {groups[0]} x {groups[1]} groups of {items} work items; "
                f"there is at least one group, of 1 to {self.info.work_group} items"
            )
        values = [arg if isinstance(arg, np.int32 | np.float32) else self._handle(kernel, arg) for arg in args]
        self._launch(kernel, handle, groups, items, values)

    def _handle(self, doing: str, buffer: Buffer) -> Any:
        """What the driver knows memory by."""
        if not isinstance(buffer, Memory):
            raise self._error(f"{doing}: {type(buffer).__name__} is neither memory nor int32 or float32")
        if buffer.device is not self:
            raise self._error(f"{doing}: memory of another device, {buffer.device.info.name}")
        if buffer.give_back is None or not buffer.give_back.alive:
            raise self._error(f"{doing}: memory of {buffer.nbytes} bytes that was freed before")
        return buffer.handle

    def _inside(self, doing: str, buffer: Buffer, array: NDArray[Any], offset: int) -> Any:
        handle = self._handle(doing, buffer)
        if not array.flags.c_contiguous:
            raise self._error(f"{doing}: the array is not contiguous")
        if offset < 0 or offset + array.nbytes > buffer.nbytes:
            raise self._error(f"{doing}: {array.nbytes} bytes at {offset}; the buffer has {buffer.nbytes}")
        return handle

    def _error(self, what: str, of_memory: bool = False) -> DeviceError:
        return (DeviceMemoryError if of_memory else DeviceError)(f"{self.info.name}: {what}")

    def _no_memory(self, nbytes: int, why: str) -> DeviceMemoryError:
        """Refusal of a buffer, with the numbers it is judged by."""
        return DeviceMemoryError(
            f"{self.info.name}: no memory for a buffer of {nbytes} bytes{why and f' ({why})'}: its largest is "
            f"{self.info.largest_buffer}, of {self.info.memory_bytes} in all {self.allocated} are given out"
        )

    @abstractmethod
    def _alloc(self, nbytes: int) -> Any: ...

    @abstractmethod
    def _free(self, handle: Any) -> None:
        """Once the work that was launched with it is done."""

    @abstractmethod
    def _write(self, handle: Any, data: NDArray[Any], offset: int) -> None: ...

    @abstractmethod
    def _read(self, handle: Any, out: NDArray[Any], offset: int) -> None: ...

    @abstractmethod
    def _build(self, source: str, defines: Mapping[str, str]) -> Any: ...

    @abstractmethod
    def _kernel(self, program: Any, name: str) -> tuple[Any, int | None]:
        """A kernel with the number of its arguments, None where the driver does not know it."""

    @abstractmethod
    def _launch(self, name: str, kernel: Any, groups: tuple[int, int], items: int, args: list[Any]) -> None: ...

    @abstractmethod
    def wait(self) -> None:
        """See Device."""


def with_defines(source: str, defines: Mapping[str, str]) -> str:
    """A source that defines them itself, its lines numbered as before: drivers disagree on how -D is quoted."""
    lines = [f"#define {name} {value}\n" for name, value in defines.items()]
    return f"{''.join(lines)}#line 1\n{source}"


def first_error(log: str) -> str:
    """The line of a compiler's log that says what is wrong, else its first."""
    lines = [line.strip() for line in log.replace("\0", "").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")[:300]
