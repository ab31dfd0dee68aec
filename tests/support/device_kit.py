"""Backends on the devices that there are here: PoCL by both OpenCL drivers, and the CUDA branch on the CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from cuda_shim import ShimDevice
from native_builds import REQUIRE

from kernels.device import opencl, opencl_ctypes
from kernels.device.backend import DeviceBackend
from kernels.device.driver import Driver
from kernels.device.opencl_devices import open_device
from kernels.errors import BackendUnavailable
from kernels.interface import Options


@functools.cache
def _lacks() -> str:
    try:
        open_device()
    except BackendUnavailable as error:
        return str(error)
    return ""


def needs_opencl(is_required: bool = "opencl" in os.environ.get(REQUIRE, "").split()) -> pytest.MarkDecorator:
    """Skips where there is no OpenCL device, with what lacks, unless there has to be one."""
    return pytest.mark.skipif(not is_required and bool(_lacks()), reason=_lacks() or "there is one")


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
