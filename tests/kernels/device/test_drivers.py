"""Every driver of devices does the same: OpenCL's two on PoCL, CUDA's over a stand-in for CuPy, and the tests' shim."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cuda_shim
import fake_cupy
import numpy as np
import pytest
from device_checks import need
from device_sample import DEFINES, NO_SEMICOLON, SOURCE, WIDTH, turned, with_fault

from kernels.device import cuda, opencl, opencl_ctypes
from kernels.device.driver import Driver
from kernels.device.interface import DeviceError, DeviceMemoryError

OPENCL: dict[str, Callable[[], Driver]] = {
    "pyopencl": lambda: opencl.open_device(environ={}),
    "ctypes": lambda: opencl_ctypes.open_device(environ={}),
}
RNG = np.random.default_rng(7)


def open_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A device of a driver; skipped, or failed where it is required, without an OpenCL device."""
    if name in OPENCL:
        need("opencl")
        return OPENCL[name]()
    if name == "shim":
        return cuda_shim.ShimDevice()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.make())
    return cuda.open_device(environ={})


@pytest.fixture(params=[*OPENCL, "cuda", "shim"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A device of each driver, which gets all of its memory back."""
    opened = open_driver(request.param, monkeypatch)
    yield opened
    gc.collect()
    assert opened.allocated == 0


def test_it_says_what_it_is(device: Driver) -> None:
    info = device.info
    assert info.name == info.name.strip() != ""
    assert any(digit.isdigit() for digit in info.driver) or info.driver == "cuda_shim.h"
    assert info.memory_bytes >= info.largest_buffer >= 1 << 20
    assert info.work_group >= 256


def test_bytes_come_back_from_where_they_were_written(device: Driver) -> None:
    whole = RNG.integers(0, 256, 5000, np.uint8)
    buffer = device.alloc(whole.nbytes)
    data = whole.copy()
    device.write(buffer, data)
    data[:] = 0  # may change as soon as it was written
    part = RNG.normal(size=(3, 7)).astype(np.float32)
    part.flags.writeable = False  # as the weights of a mapped file
    device.write(buffer, part, 1001)
    whole[1001 : 1001 + part.nbytes] = part.reshape(-1).view(np.uint8)
    out = np.empty_like(whole)
    device.read(buffer, out)
    assert (out == whole).all()
    middle = np.empty((4, 10), np.uint16)
    device.read(buffer, middle, 999)
    assert (middle.reshape(-1).view(np.uint8) == whole[999:1079]).all()


def test_no_bytes_are_no_error(device: Driver) -> None:
    buffer = device.alloc(4)
    device.write(buffer, np.empty((0, 3), np.float32), 4)
    device.read(buffer, np.empty(0, np.uint8))


def test_groups_arguments_local_memory_and_barriers(device: Driver) -> None:
    module = device.build(SOURCE, DEFINES)
    x = RNG.normal(size=(5, 3 * WIDTH)).astype(np.float32)
    given, made, y = device.alloc(x.nbytes), device.alloc(x.nbytes), np.empty_like(x)
    device.write(given, x)
    device.launch(module, "turn", (3, 5), WIDTH, [given, made, np.int32(x.shape[1]), np.float32(0.1)])
    device.wait()
    device.read(made, y)
    assert (y == turned(x, 0.1)).all()


def test_launches_run_in_the_order_of_the_calls(device: Driver) -> None:
    module = device.build(SOURCE, DEFINES)
    x = RNG.normal(size=(1, WIDTH)).astype(np.float32)
    one, two, y = device.alloc(x.nbytes), device.alloc(x.nbytes), np.empty_like(x)
    device.write(one, x)
    for _ in range(50):
        device.launch(module, "turn", (1, 1), WIDTH, [one, two, np.int32(WIDTH), np.float32(0.5)])
        device.launch(module, "turn", (1, 1), WIDTH, [two, one, np.int32(WIDTH), np.float32(-1.5)])
    device.read(one, y)
    for _ in range(50):
        x = turned(turned(x, 0.5), -1.5)
    assert (y == x).all()


def test_products_are_rounded_before_they_are_added_and_fma_rounds_once(device: Driver) -> None:
    module = device.build(SOURCE, DEFINES)
    x = RNG.normal(size=(6, WIDTH)).astype(np.float32)
    x[2] = -(x[0] * x[1])  # leaves 0, or what the product's rounding lost
    x[4] = np.float32(2.0**-126) * RNG.integers(1, 7, WIDTH).astype(np.float32)
    given, made, y = device.alloc(x.nbytes), device.alloc(x.nbytes), np.empty_like(x)
    device.write(given, x)
    device.launch(module, "rounding", (1, 1), WIDTH, [given, made])
    device.read(made, y)
    a, b, c = x[:3].astype(np.float64)
    assert (y[0] == 0).all()
    assert (y[1] == (a * b + c).astype(np.float32)).all()
    assert (y[1] != 0).any()
    assert (y[2] == x[0] / x[1]).all() or not device.info.divides_exactly
    assert (y[3] == x[4] * np.float32(0.5)).all() or not device.info.keeps_subnormals
    assert (y[4] == device.info.divides_exactly).all()


def test_sources_live_side_by_side(device: Driver) -> None:
    modules = [device.build(SOURCE, {**DEFINES, "OFFSET": f"{offset}.0f"}) for offset in (1, 2)]
    x, y = np.zeros((1, WIDTH), np.float32), np.empty((1, WIDTH), np.float32)
    given, made = device.alloc(x.nbytes), device.alloc(x.nbytes)
    device.write(given, x)
    for module, offset in [(modules[0], 1), (modules[1], 2), (modules[0], 1)]:
        device.launch(module, "turn", (1, 1), WIDTH, [given, made, np.int32(WIDTH), np.float32(1)])
        device.read(made, y)
        assert (y == offset).all()


def test_a_kernel_is_made_once_for_a_module(device: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    make = device._kernel

    def counted(program: Any, name: str) -> Any:
        made.append(name)
        return make(program, name)

    monkeypatch.setattr(device, "_kernel", counted)
    module, buffer = device.build(SOURCE, DEFINES), device.alloc(4 * WIDTH)
    for name, args in [("turn", [np.int32(0), np.float32(0)]), ("rounding", [])] * 3:
        device.launch(module, name, (1, 1), WIDTH, [device.alloc(24 * WIDTH), device.alloc(24 * WIDTH), *args])
    device.wait()
    device.free(buffer)
    assert made == ["turn", "rounding"]


def fails(device: Driver, call: Callable[[], object]) -> str:
    """The message of a DeviceError, which is a line that begins with the device's name."""
    with pytest.raises(DeviceError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"{device.info.name}: ")
    assert "\n" not in message
    return message


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_line(device: Driver) -> None:
    message = fails(device, lambda: device.build(with_fault(NO_SEMICOLON), DEFINES))
    assert "does not compile: " in message
    assert "error: " in message
    assert "expected" in message
    line = with_fault(NO_SEMICOLON).splitlines().index("  BARRIER()") + 1
    assert f":{line}:" in message or f":{line + 1}:" in message


def test_launches_that_cannot_be(device: Driver) -> None:
    module, buffer = device.build(SOURCE, DEFINES), device.alloc(24 * WIDTH)
    whole = [buffer, buffer, np.int32(0), np.float32(1)]
    launch = device.launch
    assert "nobody: " in fails(device, lambda: launch(module, "nobody", (1, 1), WIDTH, []))
    assert "there is at least one group" in fails(device, lambda: launch(module, "turn", (0, 1), WIDTH, whole))
    most = device.info.work_group
    assert f"of 1 to {most}" in fails(device, lambda: launch(module, "turn", (1, 1), most + 1, whole))
    assert "turn" in fails(device, lambda: launch(module, "turn", (1, 1), WIDTH + 1, whole))
    for wrong in (3, np.int64(3), 0.5, None):
        what = f"turn: {type(wrong).__name__} is neither memory nor int32 or float32"
        assert what in fails(device, lambda w=wrong: launch(module, "turn", (1, 1), WIDTH, [*whole[:3], w]))
    launch(module, "turn", (1, 1), WIDTH, whole)
    device.wait()


def test_a_wrong_number_of_arguments_is_seen(device: Driver) -> None:
    if isinstance(device, cuda.CudaDevice):
        return  # CUDA reads what lies there
    module, buffer = device.build(SOURCE, DEFINES), device.alloc(24 * WIDTH)
    for args in ([buffer], [buffer, buffer, np.int32(1)]):
        message = fails(device, lambda args=args: device.launch(module, "rounding", (1, 1), WIDTH, args))
        assert f"{len(args)} arguments, it takes 2" in message


def test_freed_memory_is_an_error(device: Driver) -> None:
    module, buffer, other = device.build(SOURCE, DEFINES), device.alloc(24 * WIDTH), device.alloc(24 * WIDTH)
    device.free(buffer)
    data = np.zeros(4, np.uint8)
    for call in (
        lambda: device.free(buffer),
        lambda: device.write(buffer, data),
        lambda: device.read(buffer, data),
        lambda: device.launch(module, "rounding", (1, 1), WIDTH, [other, buffer]),
    ):
        assert f"memory of {24 * WIDTH} bytes that was freed before" in fails(device, call)


def test_memory_may_be_freed_while_a_launch_with_it_is_under_way(device: Driver) -> None:
    module, made, y = device.build(SOURCE, DEFINES), device.alloc(4 * WIDTH), np.empty((1, WIDTH), np.float32)
    for turn in range(20):
        x = np.full((1, WIDTH), turn, np.float32)
        given = device.alloc(x.nbytes)
        device.write(given, x)
        device.launch(module, "turn", (1, 1), WIDTH, [given, made, np.int32(WIDTH), np.float32(1)])
        device.free(given)
        device.read(made, y)
        assert (y == turned(x, 1)).all()


def test_copies_stay_inside_the_memory(device: Driver) -> None:
    buffer, data = device.alloc(16), np.zeros(8, np.uint8)
    for offset in (-1, 9):
        assert f"8 bytes at {offset}; the buffer has 16" in fails(
            device, lambda o=offset: device.write(buffer, data, o)
        )
        assert f"8 bytes at {offset}; the buffer has 16" in fails(device, lambda o=offset: device.read(buffer, data, o))
    wide = np.zeros((4, 4), np.uint8)
    assert "not contiguous" in fails(device, lambda: device.write(buffer, wide[:, 1:]))
    assert "not contiguous" in fails(device, lambda: device.read(buffer, wide.T[:, 1:]))
    data.flags.writeable = False
    assert "cannot be written to" in fails(device, lambda: device.read(buffer, data))


def test_what_belongs_to_another_device_is_refused(device: Driver) -> None:
    other = cuda_shim.ShimDevice()
    module, buffer = device.build(SOURCE, DEFINES), other.alloc(24 * WIDTH)
    assert "memory of another device" in fails(device, lambda: device.free(buffer))
    launch = lambda: device.launch(module, "rounding", (1, 1), WIDTH, [buffer, buffer])  # noqa: E731
    assert "memory of another device" in fails(device, launch)
    foreign = lambda: device.launch(other.build(SOURCE, DEFINES), "rounding", (1, 1), WIDTH, [])  # noqa: E731
    assert "was built for" in fails(device, foreign)


def no_memory(device: Driver, nbytes: int) -> str:
    """The message that there is no memory."""
    with pytest.raises(DeviceMemoryError) as caught:
        device.alloc(nbytes)
    return str(caught.value)


def test_memory_beyond_the_devices_is_refused_with_the_numbers(device: Driver) -> None:
    device._info = replace(device.info, memory_bytes=10_000, largest_buffer=6_000)
    assert "a buffer of 0 bytes" in fails(device, lambda: device.alloc(0))
    one = device.alloc(6_000)
    numbers = "its largest is 6000, of 10000 in all 6000 are given out"
    assert no_memory(device, 6_001) == f"{device.info.name}: no memory for a buffer of 6001 bytes: {numbers}"
    assert no_memory(device, 4_001) == f"{device.info.name}: no memory for a buffer of 4001 bytes: {numbers}"
    two = device.alloc(4_000)
    device.free(one)
    one = device.alloc(6_000)
    del two  # nobody has it any more
    gc.collect()
    assert device.allocated == 6_000
    device.free(one)


@pytest.mark.parametrize("name", [*OPENCL, "cuda"])
def test_a_driver_that_refuses_memory_is_told_with_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_driver(name, monkeypatch)
    device._info = replace(device.info, memory_bytes=1 << 60, largest_buffer=1 << 60)
    why = "cudaErrorMemoryAllocation: out of memory" if name == "cuda" else "CL_INVALID_BUFFER_SIZE"
    message = no_memory(device, 1 << 50)
    assert f"no memory for a buffer of {1 << 50} bytes ({why}): its largest is {1 << 60}" in message
    assert device.allocated == 0
    assert device.alloc(64).nbytes == 64


def test_the_shim_sees_what_gpus_do_not_say() -> None:
    device = cuda_shim.ShimDevice()
    source = """
    extern "C" __global__ __launch_bounds__(8) void beside(float *x) { x[threadIdx.x] = 1.0f; }
    extern "C" __global__ __launch_bounds__(8) void some(float *x) { if (threadIdx.x < 4) __syncthreads(); }
    extern "C" __global__ __launch_bounds__(4) void race(float *x) {
      __shared__ float t[4];
      t[threadIdx.x] = x[threadIdx.x];
      x[threadIdx.x] = t[3 - threadIdx.x];
    }
    """
    module, buffer = device.build(source, {}), device.alloc(28)
    floats = np.empty(7, np.float32)
    device.read(buffer, floats)
    assert np.isnan(floats).all()
    assert "a barrier that not every" in fails(device, lambda: device.launch(module, "some", (1, 1), 8, [buffer]))
    assert "beside the memory" in fails(device, lambda: device.launch(module, "beside", (1, 1), 8, [buffer]))
    assert "kinds f, it takes p" in fails(device, lambda: device.launch(module, "race", (1, 1), 4, [np.float32(1)]))
    assert "another number" in fails(device, lambda: device.launch(module, "race", (1, 1), 5, [device.alloc(16)]))


def test_the_shims_groups_start_from_either_end() -> None:
    device = cuda_shim.ShimDevice()
    source = """
    extern "C" __global__ __launch_bounds__(4) void last(float *x) {
      __shared__ float who;
      who = threadIdx.x;
      __syncthreads();
      x[blockIdx.x] = who;
    }
    """
    buffer, found = device.alloc(16), np.empty(4, np.float32)
    device.launch(device.build(source, {}), "last", (4, 1), 4, [buffer])
    device.read(buffer, found)
    assert found.tolist() == [3, 0, 3, 0]


def test_the_shims_half_is_ieee_binary16() -> None:
    device = cuda_shim.ShimDevice()
    source = """
    extern "C" __global__ __launch_bounds__(1) void widen(const unsigned short *x, float *y) {
      for (int i = 0; i < 65536; i++) {
        union { unsigned short u; _Float16 f; } c;
        c.u = x[i];
        y[i] = (float)c.f;
      }
    }
    extern "C" __global__ __launch_bounds__(1) void narrow(const float *x, unsigned short *y, int n) {
      for (int i = 0; i < n; i++) {
        union { unsigned short u; _Float16 f; } c;
        c.f = (_Float16)x[i];
        y[i] = c.u;
      }
    }
    """
    module, halves = device.build(source, {}), np.arange(65536, dtype=np.uint16)
    given, made, floats = device.alloc(halves.nbytes), device.alloc(4 * 65536), np.empty(65536, np.float32)
    device.write(given, halves)
    device.launch(module, "widen", (1, 1), 1, [given, made])
    device.read(made, floats)
    expected = halves.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(floats[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    assert np.isnan(floats[~numbers]).all()
    finite = np.unique(expected[np.isfinite(expected)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    below, above = np.nextafter(ties, np.float32(-np.inf)), np.nextafter(ties, np.float32(np.inf))
    ends = np.array([65504, 65519, 65520, 1e6, np.inf, -np.inf, 1e-45, -0.0], np.float32)
    x = np.concatenate([ties, below, above, ends])
    given, made, narrow = device.alloc(x.nbytes), device.alloc(2 * len(x)), np.empty(len(x), np.uint16)
    device.write(given, x)
    device.launch(module, "narrow", (1, 1), 1, [given, made, np.int32(len(x))])
    device.read(made, narrow)
    with np.errstate(over="ignore"):
        assert (narrow == x.astype(np.float16).view(np.uint16)).all()
