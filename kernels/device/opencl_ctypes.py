"""OpenCL devices by ctypes alone, where PyOpenCL is not to be had: a phone's vendor library and nothing but numpy."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendUnavailable
from .driver import Driver, first_error, with_defines
from .interface import DeviceError
from .opencl_devices import (
    NO_BUFFER,
    NO_CONTRACTION,
    NO_DRIVER,
    OUT_OF_MEMORY,
    FoundDevice,
    build_options,
    choose,
    describe,
    error_name,
)
from .opencl_library import CallFailed, Library, load

_ALL, _GPU = 0xFFFFFFFF, 1 << 2
_READ_WRITE = 1 << 0
# clGetPlatformInfo, clGetDeviceInfo, clGetKernelInfo and clGetProgramBuildInfo are asked for:
_PLATFORM_NAME = 0x0902
_TYPE, _WORK_GROUP, _LARGEST, _SINGLE_FP, _MEMORY = 0x1000, 0x1004, 0x1010, 0x101B, 0x101F
_NAME, _DRIVER_VERSION = 0x102B, 0x102D
_NUM_ARGS = 0x1191
_BUILD_LOG = 0x1183

_HANDLE = struct.Struct("P")
_SIZES = c_size_t * 2


def list_devices(library: Library) -> list[FoundDevice]:
    """Every device of every platform. BackendUnavailable without any driver."""
    try:
        return [
            FoundDevice(
                platform=p,
                device=d,
                name=library.text("clGetDeviceInfo", device, _NAME),
                platform_name=library.text("clGetPlatformInfo", platform, _PLATFORM_NAME),
                is_gpu=bool(library.number("clGetDeviceInfo", device, _TYPE) & _GPU),
                handle=device,
            )
            for p, platform in enumerate(library.handles("clGetPlatformIDs"))
            for d, device in enumerate(library.handles("clGetDeviceIDs", platform, _ALL))
        ]
    except CallFailed as error:
        raise BackendUnavailable(f"opencl: {error}; {NO_DRIVER}") from None


def open_device(wanted: str | None = None, environ: Mapping[str, str] = os.environ) -> OpenCLDevice:
    """The device wanted, see `choose`. BackendUnavailable when there is none."""
    library = load(environ)
    return OpenCLDevice(library, choose(list_devices(library), wanted, environ))


class OpenCLDevice(Driver):
    """One device with an in-order queue."""

    def __init__(self, library: Library, found: FoundDevice) -> None:
        self._library, self._device = library, c_void_p(found.handle)

        def number(what: int) -> int:
            return library.number("clGetDeviceInfo", self._device, what)

        super().__init__(
            describe(
                found,
                version=library.text("clGetDeviceInfo", self._device, _DRIVER_VERSION),
                memory_bytes=number(_MEMORY),
                largest_buffer=number(_LARGEST),
                work_group=number(_WORK_GROUP),
                single_fp=number(_SINGLE_FP),
            )
        )
        self._context = self._make("", "clCreateContext", None, 1, byref(self._device), None, None)
        self._queue = self._make("", "clCreateCommandQueue", self._context, self._device, 0)

    def _do(self, where: str, name: str, *args: Any) -> None:
        try:
            self._library.do(name, *args)
        except CallFailed as error:
            raise self._failed(error, where) from None

    def _make(self, where: str, name: str, *args: Any) -> int:
        try:
            return self._library.make(name, *args)
        except CallFailed as error:
            raise self._failed(error, where) from None

    def _failed(self, error: CallFailed, where: str) -> DeviceError:
        return self._error(f"{where}{error}", error.code in OUT_OF_MEMORY)

    def _alloc(self, nbytes: int) -> Any:
        try:
            return self._library.make("clCreateBuffer", self._context, _READ_WRITE, nbytes, None)
        except CallFailed as error:
            if error.code in NO_BUFFER:
                raise self._no_memory(nbytes, error_name(error.code)) from None
            raise self._failed(error, "") from None

    def _free(self, handle: Any) -> None:
        self._do("", "clReleaseMemObject", handle)  # OpenCL keeps it until what was enqueued with it is done

    def _write(self, handle: Any, data: NDArray[Any], offset: int) -> None:
        where, copy = f"{data.nbytes} bytes to write: ", "clEnqueueWriteBuffer"
        self._do(where, copy, self._queue, handle, 1, offset, data.nbytes, data.ctypes.data, 0, None, None)

    def _read(self, handle: Any, out: NDArray[Any], offset: int) -> None:
        where, copy = f"{out.nbytes} bytes to read: ", "clEnqueueReadBuffer"
        self._do(where, copy, self._queue, handle, 1, offset, out.nbytes, out.ctypes.data, 0, None, None)

    def _build(self, source: str, defines: Mapping[str, str]) -> Any:
        text = c_char_p((NO_CONTRACTION + with_defines(source, defines)).encode())
        program = self._make("", "clCreateProgramWithSource", self._context, 1, byref(text), None)
        options = " ".join(build_options(self.info)).encode()
        try:
            self._library.do("clBuildProgram", program, 1, byref(self._device), options, None, None)
        except CallFailed as error:
            log = self._library.text("clGetProgramBuildInfo", program, self._device, _BUILD_LOG)
            raise self._error(f"the source does not compile: {first_error(log or str(error))}") from None
        return program

    def _kernel(self, program: Any, name: str) -> tuple[Any, int | None]:
        kernel = self._make(f"{name}: ", "clCreateKernel", program, name.encode())
        return kernel, self._library.number("clGetKernelInfo", kernel, _NUM_ARGS)

    def _launch(self, name: str, kernel: Any, groups: tuple[int, int], items: int, args: list[Any]) -> None:
        try:
            for i, arg in enumerate(args):
                value = arg.tobytes() if isinstance(arg, np.number) else _HANDLE.pack(arg)
                self._library.do("clSetKernelArg", kernel, i, len(value), value)
            whole, group = _SIZES(groups[0] * items, groups[1]), _SIZES(items, 1)
            self._library.do("clEnqueueNDRangeKernel", self._queue, kernel, 2, None, whole, group, 0, None, None)
        except CallFailed as error:
            raise self._failed(error, f"{name}: ") from None

    def wait(self) -> None:
        """See Device."""
        self._do("", "clFinish", self._queue)
