"""What the `cuda` driver asks of CuPy, over the shim: its calls check their arguments as CuPy and CUDA would take them."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Sequence
from typing import Any

import cuda_shim
import numpy as np

MEMORY = 1 << 30
_OUT_OF_MEMORY, _INVALID_VALUE, _NOT_FOUND = 2, 1, 500


class CUDARuntimeError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CUDADriverError(CUDARuntimeError):
    """cupy.cuda.driver.CUDADriverError."""


class CompileException(Exception):  # CuPy's name
    """cupy.cuda.compiler.CompileException."""


class Runtime:
    """cupy.cuda.runtime, with `devices` of this CPU."""

    memcpyHostToDevice, memcpyDeviceToHost = 1, 2  # noqa: N815
    CUDARuntimeError = CUDARuntimeError
    is_hip = False

    def __init__(self, devices: Sequence[str] = ("A GPU", "Another GPU")) -> None:
        self.devices, self.current = devices, 0
        self.memory = dict[int, cuda_shim.Bytes]()
        self.queued = 0  #: what was begun since a stream was waited for

    def getDeviceCount(self) -> int:  # noqa: N802
        if not self.devices:
            raise CUDARuntimeError(35, "cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return len(self.devices)

    def getDeviceProperties(self, index: int) -> dict[str, Any]:  # noqa: N802
        return {"name": self.devices[index].encode(), "totalGlobalMem": MEMORY, "maxThreadsPerBlock": 1024}

    def driverGetVersion(self) -> int:  # noqa: N802
        return 70051831 if self.is_hip else 13000

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.current = index

    def malloc(self, nbytes: int) -> int:
        if sum(len(m.data) for m in self.memory.values()) + nbytes > MEMORY * 3 // 4:  # the rest is another process's
            raise CUDARuntimeError(_OUT_OF_MEMORY, "cudaErrorMemoryAllocation: out of memory")
        made = cuda_shim.Bytes(nbytes)
        self.memory[made.address] = made
        return made.address

    def free(self, pointer: int) -> None:
        if self.memory.pop(pointer, None) is None:
            raise CUDARuntimeError(_INVALID_VALUE, "cudaErrorInvalidValue: invalid argument")

    def memcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:  # noqa: N802
        device = to if kind == self.memcpyHostToDevice else source
        assert stream == Stream.ptr
        assert kind in (self.memcpyHostToDevice, self.memcpyDeviceToHost)
        if not any(at <= device and device + nbytes <= at + len(m.data) for at, m in self.memory.items()):
            raise CUDARuntimeError(_INVALID_VALUE, "cudaErrorInvalidValue: invalid argument")
        self.queued += 1
        ctypes.memmove(to, source, nbytes)


class Stream:
    """cupy.cuda.Stream."""

    ptr = 77
    current: Stream | None = None
    runtime: Runtime

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking

    def __enter__(self) -> Stream:
        Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = None

    def synchronize(self) -> None:
        self.runtime.queued = 0


class RawKernel:
    """cupy.RawKernel, of a module."""

    def __init__(self, kernel: cuda_shim.Kernel) -> None:
        self._kernel = kernel

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        kernel = self._kernel
        assert Stream.current is not None, "launched on the default stream"
        scalars = [np.int64(arg) if isinstance(arg, int) else arg for arg in args]
        given, taken = [arg.nbytes for arg in scalars], [{"p": 8}.get(kind, 4) for kind in kernel.kinds]
        assert given == taken, f"CUDA would read {taken} bytes for arguments of {given}"
        Stream.runtime.queued += 1
        (x, y), (items,) = grid, block
        if kernel.launch((x, y), items, [scalar.tobytes() for scalar in scalars]):
            raise CUDADriverError(_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE: invalid argument")


class RawModule:
    """cupy.RawModule."""

    options_seen: tuple[str, ...] = ()

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        assert all(isinstance(option, str) for option in options)
        self._code = code
        RawModule.options_seen = options

    def kernels(self) -> dict[str, cuda_shim.Kernel]:
        try:
            return cuda_shim.build(self._code)
        except cuda_shim.CompileError as error:
            raise CompileException(str(error)) from None

    def compile(self) -> None:
        self.kernels()

    def get_function(self, name: str) -> RawKernel:
        if name not in self.kernels():
            raise CUDADriverError(_NOT_FOUND, "CUDA_ERROR_NOT_FOUND: named symbol not found")
        return RawKernel(self.kernels()[name])


def make() -> Any:
    """A module to stand in for `cupy`."""
    runtime = Runtime()
    Stream.runtime = runtime
    cuda = types.SimpleNamespace(
        runtime=runtime, Stream=Stream, compiler=types.SimpleNamespace(CompileException=CompileException)
    )
    module: Any = types.ModuleType("cupy")
    module.cuda, module.RawModule, module.__version__ = cuda, RawModule, "14.2.0"
    return module
