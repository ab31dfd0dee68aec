"""What the `cuda` driver asks of CuPy and CUDA, over a stand-in: no GPU is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
from device_sample import DEFINES, SOURCE, WIDTH

from kernels.device import cuda
from kernels.device.interface import DeviceError, DeviceMemoryError
from kernels.errors import BackendUnavailable


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, as `import cupy` gives it."""
    module = fake_cupy.make()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize(
    ("wanted", "environ", "expected"),
    [(None, "", 0), ("1", "", 1), (None, "1", 1), ("another", "0", 1), ("GPU", "", 0), ("0", "1", 0)],
)
def test_the_device_asked_for_is_taken(cupy: Any, wanted: str | None, environ: str, expected: int) -> None:
    device = cuda.open_device(wanted, {"EXPERTSWARM_CUDA_DEVICE": environ})
    assert device.info.name == ["A GPU", "Another GPU"][expected]
    assert cupy.cuda.runtime.current == expected


@pytest.mark.parametrize("wanted", ["2", "10", "radeon"])
def test_a_device_that_is_not_there_is_named_beside_those_that_are(cupy: Any, wanted: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        cuda.open_device(wanted, {})
    assert str(caught.value) == f"cuda: there is no device {wanted!r}; there are 0 A GPU, 1 Another GPU"


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match=r"^cuda: CuPy cannot be imported .*'expertswarm\[cuda\]'.*rocm-7-0"):
        cuda.open_device()


def test_without_a_driver_it_says_so(cupy: Any) -> None:
    cupy.cuda.runtime.devices = ()
    with pytest.raises(BackendUnavailable, match=r"cudaErrorInsufficientDriver: .*; install the GPU's driver"):
        cuda.open_device(environ={})


def test_no_device_at_all(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(BackendUnavailable, match=r"cuda: there is no device; install"):
        cuda.open_device(environ={})


@pytest.mark.parametrize(
    ("is_hip", "options", "driver"),
    [(False, cuda.CUDA_OPTIONS, "CUDA 13.0, CuPy 14.2.0"), (True, cuda.HIP_OPTIONS, "HIP 7.0, CuPy 14.2.0")],
)
def test_the_compiler_is_told_to_keep_to_the_arithmetic(
    cupy: Any, is_hip: bool, options: tuple[str, ...], driver: str
) -> None:
    cupy.cuda.runtime.is_hip = is_hip
    device = cuda.open_device(environ={})
    device.build(SOURCE, DEFINES)
    assert fake_cupy.RawModule.options_seen == options
    assert any("fmad=false" in option or option == "-ffp-contract=off" for option in options)
    assert not any("fast" in option for option in options)
    assert device.info.driver == driver


def test_copies_are_done_when_they_return_and_launches_need_not_be(cupy: Any) -> None:
    device, runtime = cuda.open_device(environ={}), cupy.cuda.runtime
    module, buffer = device.build(SOURCE, DEFINES), device.alloc(24 * WIDTH)

    def queued_after(call: Callable[[], object]) -> int:
        device.launch(module, "rounding", (1, 1), WIDTH, [buffer, buffer])
        assert runtime.queued == 1
        call()
        return int(runtime.queued)

    data = np.zeros(4, np.uint8)
    assert queued_after(lambda: device.write(buffer, data)) == 0
    assert queued_after(lambda: device.read(buffer, data)) == 0
    assert queued_after(device.wait) == 0
    assert queued_after(lambda: device.free(device.alloc(4))) == 0


def test_freed_memory_is_the_devices_again(cupy: Any) -> None:
    device = cuda.open_device(environ={})
    one = device.alloc(fake_cupy.MEMORY * 5 // 8)
    with pytest.raises(DeviceMemoryError, match=r"cudaErrorMemoryAllocation: out of memory"):
        device.alloc(fake_cupy.MEMORY // 4)  # within the device's memory, but another process has it
    device.free(one)
    assert not cupy.cuda.runtime.memory
    device.alloc(fake_cupy.MEMORY * 5 // 8)


def test_each_thread_makes_the_device_its_own(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = cuda.open_device("1", {})
    cupy.cuda.runtime.current = 0  # as it is in a thread that has not said anything
    device.alloc(4)
    assert cupy.cuda.runtime.current == 0  # the same thread
    monkeypatch.setattr(cuda.threading, "get_ident", lambda: -1)
    device.alloc(4)
    assert cupy.cuda.runtime.current == 1


def test_a_failure_of_the_driver_names_the_device_and_the_kernel(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = cuda.open_device(environ={})
    module, buffer = device.build(SOURCE, DEFINES), device.alloc(24 * WIDTH)
    for status, kind in ((700, DeviceError), (2, DeviceMemoryError)):

        def fail(*args: Any, status: int = status) -> None:
            raise fake_cupy.CUDADriverError(status, "CUDA_ERROR: as it were")

        monkeypatch.setattr(fake_cupy.RawKernel, "__call__", fail)
        with pytest.raises(DeviceError, match="^A GPU: rounding: CUDA_ERROR: as it were$") as caught:
            device.launch(module, "rounding", (1, 1), WIDTH, [buffer, buffer])
        assert type(caught.value) is kind
