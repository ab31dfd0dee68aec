"""The OpenCL calls that we use, bound by ctypes: where the library is looked for, and how its calls fail."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Iterator, Mapping
from ctypes import byref, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from ..errors import BackendUnavailable
from .opencl_devices import LIBRARY, NO_DRIVER, error_name

#: Where Android keeps its vendor's library is no place that a loader looks in by itself.
NAMES = ("libOpenCL.so", "libOpenCL.so.1", "/vendor/lib64/libOpenCL.so", "/system/vendor/lib64/libOpenCL.so")

_POINTER, _COUNT = c_void_p, c_uint32
_QUERY = [_POINTER, c_uint32, c_size_t, _POINTER, _POINTER]
_COPY = [_POINTER, _POINTER, c_uint32, c_size_t, c_size_t, _POINTER, _COUNT, _POINTER, _POINTER]
#: The calls that give an error's number.
_STATUS: Mapping[str, list[Any]] = {
    "clGetPlatformIDs": [_COUNT, _POINTER, _POINTER],
    "clGetPlatformInfo": _QUERY,
    "clGetDeviceIDs": [_POINTER, c_uint64, _COUNT, _POINTER, _POINTER],
    "clGetDeviceInfo": _QUERY,
    "clEnqueueWriteBuffer": _COPY,
    "clEnqueueReadBuffer": _COPY,
    "clBuildProgram": [_POINTER, _COUNT, _POINTER, c_char_p, _POINTER, _POINTER],
    "clGetProgramBuildInfo": [_POINTER, *_QUERY],
    "clGetKernelInfo": _QUERY,
    "clSetKernelArg": [_POINTER, c_uint32, c_size_t, _POINTER],
    "clEnqueueNDRangeKernel": [_POINTER, _POINTER, _COUNT, *[_POINTER] * 3, _COUNT, _POINTER, _POINTER],
    "clFinish": [_POINTER],
    "clReleaseMemObject": [_POINTER],
}
#: The calls that give an object, and the error's number by their last argument.
_OBJECT: Mapping[str, list[Any]] = {
    "clCreateContext": [_POINTER, _COUNT, _POINTER, _POINTER, _POINTER, _POINTER],
    "clCreateCommandQueue": [_POINTER, _POINTER, c_uint64, _POINTER],
    "clCreateBuffer": [_POINTER, c_uint64, c_size_t, _POINTER, _POINTER],
    "clCreateProgramWithSource": [_POINTER, _COUNT, _POINTER, _POINTER, _POINTER],
    "clCreateKernel": [_POINTER, c_char_p, _POINTER],
}
_DEVICE_NOT_FOUND = -1


class CallFailed(Exception):
    """An OpenCL call that gave an error."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed: {error_name(code)}")
        self.code = code


class Library:
    """The OpenCL calls we use; CallFailed is raised for their errors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = dict[str, Any]()
        for name, arguments in {**_STATUS, **_OBJECT}.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int32 if name in _STATUS else c_void_p
            self._functions[name] = function

    def do(self, name: str, *args: Any) -> None:
        """A call that gives only success or an error."""
        if code := self._functions[name](*args):
            raise CallFailed(name, code)

    def make(self, name: str, *args: Any) -> int:
        """A call that gives an object."""
        code = c_int32()
        made: int | None = self._functions[name](*args, byref(code))
        if code.value or made is None:
            raise CallFailed(name, code.value)
        return made

    def ask(self, name: str, *what: Any) -> bytes:
        """The value that a call of the clGet...Info kind gives."""
        size = c_size_t()
        self.do(name, *what, 0, None, byref(size))
        value = ctypes.create_string_buffer(max(1, size.value))
        self.do(name, *what, size.value, value, None)
        return value.raw[: size.value]

    def text(self, name: str, *what: Any) -> str:
        """The same for a text."""
        return self.ask(name, *what).rstrip(b"\0").decode("utf-8", "replace").strip()

    def number(self, name: str, *what: Any) -> int:
        """The same for a number of whatever width."""
        return int.from_bytes(self.ask(name, *what), "little")

    def handles(self, name: str, *what: Any) -> list[int]:
        """What platforms or devices there are; none at all may be an error with OpenCL."""
        count = c_uint32()
        try:
            self.do(name, *what, 0, None, byref(count))
        except CallFailed as error:
            if error.code == _DEVICE_NOT_FOUND:
                return []
            raise
        found = (c_void_p * max(1, count.value))()
        self.do(name, *what, count.value, found, None)
        return [handle for handle in found if handle is not None]


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    if environ.get(LIBRARY):
        yield environ[LIBRARY]
    yield from NAMES
    if found := ctypes.util.find_library("OpenCL"):  # asked last: it starts programs to find out
        yield found


def load(environ: Mapping[str, str] = os.environ) -> Library:
    """The first OpenCL library that loads. BackendUnavailable where there is none."""
    for name in _candidates(environ):
        try:
            return Library(ctypes.CDLL(name))
        except (OSError, AttributeError):  # not there; or a library that has not the calls
            continue
    raise BackendUnavailable(f"opencl: there is no libOpenCL.so; {NO_DRIVER}")
