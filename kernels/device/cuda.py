"""NVIDIA's devices by CUDA and AMD's by ROCm, both through CuPy: the same calls, and the same text to compile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendUnavailable
from .driver import Driver, first_error, with_defines
from .interface import DeviceError, DeviceInfo

#: Names a device: its number, or a part of its name.
DEVICE = "EXPERTSWARM_CUDA_DEVICE"
INSTALL = (
    "pip install 'expertswarm[cuda]' for CUDA 13, cupy-cuda12x for CUDA 12 (Pascal and Volta too), "
    "cupy-rocm-7-0 for AMD with ROCm 7"
)
#: All but the first two are what NVRTC does anyway; the numbers depend on them.
CUDA_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
#: Division is exact and subnormals are kept unless clang is told otherwise.
HIP_OPTIONS = ("-std=c++17", "-ffp-contract=off")

_OUT_OF_MEMORY = 2  #: to CUDA's runtime, its driver and HIP alike


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:  # also of ROCm's build where there is no ROCm
        why = " ".join(str(error).split())[:300]
        raise BackendUnavailable(f"cuda: CuPy cannot be imported ({why}); {INSTALL}") from None
    return cupy


def list_devices() -> list[str]:
    """The devices' names by number. BackendUnavailable without CuPy or any driver."""
    runtime = _cupy().cuda.runtime
    try:
        count = runtime.getDeviceCount()
        return [runtime.getDeviceProperties(i)["name"].decode("utf-8", "replace") for i in range(count)]
    except RuntimeError as error:
        raise BackendUnavailable(f"cuda: {error}; install the GPU's driver") from None


def open_device(wanted: str | None = None, environ: Mapping[str, str] = os.environ) -> CudaDevice:
    """The device wanted, by the setting or else $EXPERTSWARM_CUDA_DEVICE, else the first.

    BackendUnavailable when there is none, or none of that name.
    """
    names, wanted = list_devices(), wanted or environ.get(DEVICE, "")
    if not names:
        raise BackendUnavailable("cuda: there is no device; install the GPU's driver")
    for i, name in enumerate(names):
        if wanted == str(i) or (not wanted.isdecimal() and wanted.lower() in name.lower()):
            return CudaDevice(i)
    listed = ", ".join(f"{i} {name}" for i, name in enumerate(names))
    raise BackendUnavailable(f"cuda: there is no device {wanted!r}; there are {listed}")


class CudaDevice(Driver):
    """One device with a stream of its own. Memory is the runtime's, not CuPy's pool's: what is freed is free."""

    def __init__(self, index: int) -> None:
        self._cupy = cupy = _cupy()
        self._runtime = runtime = cupy.cuda.runtime
        self._index, self._thread = index, 0
        about = runtime.getDeviceProperties(index)
        version, is_hip = runtime.driverGetVersion(), bool(runtime.is_hip)
        super().__init__(
            DeviceInfo(
                name=about["name"].decode("utf-8", "replace"),
                driver=f"{'HIP' if is_hip else 'CUDA'} {_version(version, is_hip)}, CuPy {cupy.__version__}",
                memory_bytes=about["totalGlobalMem"],
                largest_buffer=about["totalGlobalMem"],
                work_group=about["maxThreadsPerBlock"],
                divides_exactly=True,
                keeps_subnormals=True,
            )
        )
        self._options = HIP_OPTIONS if is_hip else CUDA_OPTIONS
        self._stream = self._call("", cupy.cuda.Stream, non_blocking=True)

    def _call(self, where: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            if self._thread != threading.get_ident():  # each thread has a device of its own that is current
                self._runtime.setDevice(self._index)
                self._thread = threading.get_ident()
            return function(*args, **options)
        except (RuntimeError, MemoryError) as error:  # CuPy's errors of the runtime and of the driver, and of its pool
            raise self._failed(error, where) from None

    def _failed(self, error: Exception, where: str) -> DeviceError:
        of_memory = isinstance(error, MemoryError) or getattr(error, "status", 0) == _OUT_OF_MEMORY
        return self._error(f"{where}{error}", of_memory)

    def _alloc(self, nbytes: int) -> int:
        try:
            pointer: int = self._call("", self._runtime.malloc, nbytes)
        except DeviceError as error:
            raise self._no_memory(nbytes, str(error).removeprefix(f"{self.info.name}: ")) from None
        return pointer

    def _free(self, handle: int) -> None:
        self.wait()
        self._call("free: ", self._runtime.free, handle)

    def _write(self, handle: int, data: NDArray[Any], offset: int) -> None:
        kind = self._runtime.memcpyHostToDevice
        self._copy(f"{data.nbytes} bytes to write: ", handle + offset, data.ctypes.data, data.nbytes, kind)

    def _read(self, handle: int, out: NDArray[Any], offset: int) -> None:
        kind = self._runtime.memcpyDeviceToHost
        self._copy(f"{out.nbytes} bytes to read: ", out.ctypes.data, handle + offset, out.nbytes, kind)

    def _copy(self, where: str, to: int, source: int, nbytes: int, kind: int) -> None:
        self._call(where, self._runtime.memcpyAsync, to, source, nbytes, kind, self._stream.ptr)
        self._call(where, self._stream.synchronize)  # whether the host's memory was read by then depends on the driver

    def _build(self, source: str, defines: Mapping[str, str]) -> Any:
        text = with_defines(source, defines)
        module = self._call("", self._cupy.RawModule, code=text, options=self._options)
        try:
            self._call("the source does not load: ", module.compile)
        except self._cupy.cuda.compiler.CompileException as error:
            raise self._error(f"the source does not compile: {first_error(str(error))}") from None
        return module

    def _kernel(self, program: Any, name: str) -> tuple[Any, int | None]:
        return self._call(f"{name}: ", program.get_function, name), None

    def _launch(self, name: str, kernel: Any, groups: tuple[int, int], items: int, args: list[Any]) -> None:
        # CuPy hands over each NumPy scalar as its bytes, and a Python integer as 64 bits.
        values = tuple(np.uint64(arg) if isinstance(arg, int) else arg for arg in args)
        self._call(f"{name}: ", self._start, kernel, groups, (items,), values)

    def _start(self, kernel: Any, *how: Any) -> None:
        with self._stream:
            kernel(*how)

    def wait(self) -> None:
        """See Device."""
        self._call("", self._stream.synchronize)


def _version(number: int, is_hip: bool) -> str:
    """As its maker writes it: CUDA's 13000 is 13.0, HIP's 70051831 is 7.0."""
    major = 10_000_000 if is_hip else 1000
    return f"{number // major}.{number % major // (major // 100)}"
