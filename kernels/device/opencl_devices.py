"""What both OpenCL drivers go by: which devices there are, which one is taken, what its numbers and errors mean."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import BackendUnavailable
from .driver import Driver
from .interface import DeviceInfo

#: Names a device: "platform:device" in numbers, or a part of its name or its platform's.
DEVICE = "EXPERTSWARM_OPENCL_DEVICE"
#: Names the OpenCL library; PyOpenCL brings its own loader, so that our own binding is then tried first.
LIBRARY = "EXPERTSWARM_OPENCL"
NO_DRIVER = (
    "install your GPU's OpenCL driver (for the CPU: apt install pocl-opencl-icd ocl-icd-libopencl1), "
    f"or name its library in ${LIBRARY}"
)

STANDARD = "-cl-std=CL1.2"
EXACT_DIVISION = "-cl-fp32-correctly-rounded-divide-sqrt"
#: OpenCL C may fuse a product with a sum unless it is told not to, and has no option for it.
NO_CONTRACTION = "#pragma OPENCL FP_CONTRACT OFF\n"

_DENORM = 1 << 0
_EXACT_DIVIDE_SQRT = 1 << 7
_FROM_0 = """SUCCESS DEVICE_NOT_FOUND DEVICE_NOT_AVAILABLE COMPILER_NOT_AVAILABLE MEM_OBJECT_ALLOCATION_FAILURE
OUT_OF_RESOURCES OUT_OF_HOST_MEMORY PROFILING_INFO_NOT_AVAILABLE MEM_COPY_OVERLAP IMAGE_FORMAT_MISMATCH
IMAGE_FORMAT_NOT_SUPPORTED BUILD_PROGRAM_FAILURE MAP_FAILURE MISALIGNED_SUB_BUFFER_OFFSET
EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST COMPILE_PROGRAM_FAILURE LINKER_NOT_AVAILABLE LINK_PROGRAM_FAILURE
DEVICE_PARTITION_FAILED KERNEL_ARG_INFO_NOT_AVAILABLE""".split()
_FROM_30 = """INVALID_VALUE INVALID_DEVICE_TYPE INVALID_PLATFORM INVALID_DEVICE INVALID_CONTEXT INVALID_QUEUE_PROPERTIES
INVALID_COMMAND_QUEUE INVALID_HOST_PTR INVALID_MEM_OBJECT INVALID_IMAGE_FORMAT_DESCRIPTOR INVALID_IMAGE_SIZE
INVALID_SAMPLER INVALID_BINARY INVALID_BUILD_OPTIONS INVALID_PROGRAM INVALID_PROGRAM_EXECUTABLE INVALID_KERNEL_NAME
INVALID_KERNEL_DEFINITION INVALID_KERNEL INVALID_ARG_INDEX INVALID_ARG_VALUE INVALID_ARG_SIZE INVALID_KERNEL_ARGS
INVALID_WORK_DIMENSION INVALID_WORK_GROUP_SIZE INVALID_WORK_ITEM_SIZE INVALID_GLOBAL_OFFSET INVALID_EVENT_WAIT_LIST
INVALID_EVENT INVALID_OPERATION INVALID_GL_OBJECT INVALID_BUFFER_SIZE INVALID_MIP_LEVEL INVALID_GLOBAL_WORK_SIZE
INVALID_PROPERTY INVALID_IMAGE_DESCRIPTOR INVALID_COMPILER_OPTIONS INVALID_LINKER_OPTIONS
INVALID_DEVICE_PARTITION_COUNT""".split()
ERRORS: Mapping[int, str] = {
    **{-i: f"CL_{name}" for i, name in enumerate(_FROM_0)},
    **{-30 - i: f"CL_{name}" for i, name in enumerate(_FROM_30)},
    -1001: "CL_PLATFORM_NOT_FOUND_KHR",
}
#: Errors that mean memory: of any call, and those that mean it where memory is asked for.
OUT_OF_MEMORY = frozenset({-4, -6})
NO_BUFFER = OUT_OF_MEMORY | {-5, -61}


def error_name(code: int) -> str:
    """CL_... for an error's number."""
    return ERRORS.get(code, f"OpenCL error {code}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """A device that could be taken."""

    platform: int
    device: int  #: its number on the platform
    name: str
    platform_name: str
    is_gpu: bool
    handle: Any  #: the driver's

    def __str__(self) -> str:
        return f"{self.platform}:{self.device} {self.name} ({self.platform_name})"


def choose(found: Sequence[FoundDevice], wanted: str | None, environ: Mapping[str, str] = os.environ) -> FoundDevice:
    """The device wanted, by the setting or else $EXPERTSWARM_OPENCL_DEVICE; else a GPU before anything else.

    BackendUnavailable when there is none, or none of that name.
    """
    if not found:
        raise BackendUnavailable(f"opencl: there is no OpenCL device; {NO_DRIVER}")
    wanted = wanted or environ.get(DEVICE, "")
    ranked = sorted(found, key=lambda one: not one.is_gpu)
    if re.fullmatch(r"\d+:\d+", wanted):
        fitting = [one for one in ranked if f"{one.platform}:{one.device}" == wanted]
    else:
        fitting = [one for one in ranked if wanted.lower() in f"{one.name}\n{one.platform_name}".lower()]
    if not fitting:
        raise BackendUnavailable(f"opencl: there is no device {wanted!r}; there are {', '.join(map(str, found))}")
    return fitting[0]


def describe(
    found: FoundDevice, *, version: str, memory_bytes: int, largest_buffer: int, work_group: int, single_fp: int
) -> DeviceInfo:
    """A device from what OpenCL says of it; `single_fp` is CL_DEVICE_SINGLE_FP_CONFIG."""
    return DeviceInfo(
        name=found.name,
        driver=f"{found.platform_name} {version}",
        memory_bytes=memory_bytes,
        largest_buffer=largest_buffer,
        work_group=work_group,
        divides_exactly=bool(single_fp & _EXACT_DIVIDE_SQRT),
        keeps_subnormals=bool(single_fp & _DENORM),
    )


def build_options(info: DeviceInfo) -> list[str]:
    """What the compiler is told besides the source."""
    return [STANDARD, *([EXACT_DIVISION] if info.divides_exactly else [])]


def open_device(wanted: str | None = None, environ: Mapping[str, str] = os.environ) -> Driver:
    """A device by PyOpenCL, or by our own binding where that is not installed. BackendUnavailable says what lacks."""
    from . import opencl, opencl_ctypes

    drivers = [opencl.open_device, opencl_ctypes.open_device]
    if environ.get(LIBRARY):
        drivers.reverse()
    problems = list[str]()
    for driver in drivers:
        try:
            return driver(wanted, environ)
        except BackendUnavailable as error:
            problems.append(str(error).removeprefix("opencl: "))
    raise BackendUnavailable(f"opencl: {'; '.join(dict.fromkeys(problems))}")
