"""Backends on the devices that there are here: PoCL by both OpenCL drivers, and the CUDA branch on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from cuda_shim import ShimDevice
from device_checks import is_required, lacks

from kernels.device import opencl, opencl_ctypes
from kernels.device.backend import DeviceBackend
from kernels.device.driver import Driver
from kernels.interface import Options


def needs_opencl() -> pytest.MarkDecorator:
    """Skips where there is no OpenCL device, with what lacks, unless there has to be one."""
    problem = None if is_required("opencl") else lacks("opencl")
    return pytest.mark.skipif(problem is not None, reason=problem or "there is one")


def _by_own_division() -> Driver:
    """A device that divides by integers, as those have to whose own division is not exact."""
    device = opencl.open_device()
    device._info = replace(device.info, divides_exactly=False)
    return device


DEVICES: dict[str, Callable[[], Driver]] = {
    "pyopencl": opencl.open_device,
    "ctypes": opencl_ctypes.open_device,
    "own-division": _by_own_division,
    "cuda-shim": ShimDevice,
}
#: The drivers, on PoCL; with them the one that divides by integers; with it the shim, which is for small shapes.
DRIVERS = [pytest.param(name, marks=needs_opencl()) for name in ("pyopencl", "ctypes")]
DIVIDING = [*DRIVERS, pytest.param("own-division", marks=needs_opencl())]
ALL = [*DIVIDING, pytest.param("cuda-shim")]


@functools.cache
def device_backend(name: str) -> DeviceBackend:
    """The backend on one of DEVICES; one for all tests."""
    return DeviceBackend(name, DEVICES[name](), Options())
