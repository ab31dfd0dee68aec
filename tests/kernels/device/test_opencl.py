"""What is OpenCL's own: which device is taken, where the library is looked for, what its errors are called."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pyopencl
import pytest
from device_checks import need
from device_sample import DEFINES, SOURCE, WIDTH

from kernels.device import opencl, opencl_ctypes, opencl_devices, opencl_library
from kernels.device.interface import DeviceError, DeviceMemoryError
from kernels.device.opencl_devices import FoundDevice, choose
from kernels.device.opencl_library import CallFailed
from kernels.errors import BackendUnavailable


def found(platform: int, device: int, name: str, platform_name: str, *, is_gpu: bool) -> FoundDevice:
    return FoundDevice(
        platform=platform, device=device, name=name, platform_name=platform_name, is_gpu=is_gpu, handle=None
    )


DEVICES = [
    found(0, 0, "pthread", "Portable Computing Language", is_gpu=False),
    found(1, 0, "Iris Xe", "Intel", is_gpu=True),
    found(1, 1, "Arc A770", "Intel", is_gpu=True),
]


@pytest.mark.parametrize(
    ("wanted", "environ", "expected"),
    [
        (None, "", "1:0"),
        ("", "", "1:0"),
        ("0:0", "", "0:0"),
        ("1:1", "0:0", "1:1"),
        (None, "1:1", "1:1"),
        (None, "arc", "1:1"),
        ("portable", "arc", "0:0"),
        ("intel", "", "1:0"),
    ],
)
def test_a_gpu_is_taken_first_and_then_what_was_asked_for(wanted: str | None, environ: str, expected: str) -> None:
    one = choose(DEVICES, wanted, {"EXPERTSWARM_OPENCL_DEVICE": environ})
    assert f"{one.platform}:{one.device}" == expected


def test_without_a_gpu_another_device_is_taken() -> None:
    assert choose(DEVICES[:1], None, {}) is DEVICES[0]


@pytest.mark.parametrize("wanted", ["0:1", "2:0", "radeon"])
def test_a_device_that_is_not_there_is_named_beside_those_that_are(wanted: str) -> None:
    listed = "0:0 pthread (Portable Computing Language), 1:0 Iris Xe (Intel), 1:1 Arc A770 (Intel)"
    with pytest.raises(BackendUnavailable) as caught:
        choose(DEVICES, wanted, {})
    assert str(caught.value) == f"opencl: there is no device {wanted!r}; there are {listed}"


def test_no_device_says_what_to_install() -> None:
    with pytest.raises(BackendUnavailable, match=r"no OpenCL device; .*apt install pocl-opencl-icd"):
        choose([], None, {})


def test_both_drivers_list_the_same_devices() -> None:
    need("opencl")
    ours = opencl_ctypes.list_devices(opencl_ctypes.load({}))
    theirs = opencl.list_devices()
    assert {(d.name, d.platform_name, d.is_gpu) for d in ours} == {(d.name, d.platform_name, d.is_gpu) for d in theirs}
    infos = [module.open_device("0:0", {}).info for module in (opencl, opencl_ctypes)]
    assert infos[0] == infos[1]


def test_every_error_has_opencls_name() -> None:
    status = pyopencl.status_code
    names = {getattr(status, name): name for name in dir(status) if name.isupper()}
    core = {code: f"CL_{name}" for code, name in names.items() if -68 <= code <= 0}  # up to OpenCL 1.2's last
    assert len(core) > 50
    assert {code: opencl_devices.error_name(code) for code in core} == core
    assert opencl_devices.error_name(-1001) == "CL_PLATFORM_NOT_FOUND_KHR"
    assert opencl_devices.error_name(-9999) == "OpenCL error -9999"


def test_where_the_library_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def refuse(name: str) -> Any:
        asked.append(name)
        raise OSError

    monkeypatch.setattr(opencl_library.ctypes, "CDLL", refuse)
    monkeypatch.setattr(opencl_library.ctypes.util, "find_library", lambda name: f"found {name}")
    with pytest.raises(BackendUnavailable, match=r"no libOpenCL\.so; install .* \$EXPERTSWARM_OPENCL$"):
        opencl_library.load({"EXPERTSWARM_OPENCL": "/mine.so"})
    everywhere = ["libOpenCL.so", "libOpenCL.so.1", "/vendor/lib64/libOpenCL.so", "/system/vendor/lib64/libOpenCL.so"]
    assert asked == ["/mine.so", *everywhere, "found OpenCL"]
    asked.clear()
    with pytest.raises(BackendUnavailable):
        opencl_library.load({})
    assert asked == [*everywhere, "found OpenCL"]


def test_a_library_without_the_calls_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    need("opencl")
    load = ctypes.CDLL
    asked = list[str]()

    def recorded(name: str) -> ctypes.CDLL:
        asked.append(name)
        return load("libc.so.6" if name == "/mine.so" else name)

    monkeypatch.setattr(opencl_library.ctypes, "CDLL", recorded)
    assert opencl_ctypes.list_devices(opencl_library.load({"EXPERTSWARM_OPENCL": "/mine.so"}))
    assert asked[:2] == ["/mine.so", "libOpenCL.so"]


class Failing:
    """A library whose calls fail."""

    def __init__(self, code: int) -> None:
        self.code = code

    def handles(self, name: str, *what: Any) -> list[int]:
        raise CallFailed(name, self.code)


def test_a_loader_without_drivers_says_what_to_install() -> None:
    with pytest.raises(BackendUnavailable, match=r"clGetPlatformIDs failed: CL_PLATFORM_NOT_FOUND_KHR; install your"):
        opencl_ctypes.list_devices(Failing(-1001))  # type: ignore[arg-type]


def test_pyopencl_first_and_our_own_binding_where_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    need("opencl")
    assert isinstance(opencl_devices.open_device(None, {}), opencl.OpenCLDevice)
    named = {"EXPERTSWARM_OPENCL": "libOpenCL.so.1"}
    assert isinstance(opencl_devices.open_device(None, named), opencl_ctypes.OpenCLDevice)
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    assert isinstance(opencl_devices.open_device(None, {}), opencl_ctypes.OpenCLDevice)


def test_neither_says_what_each_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError

    monkeypatch.setitem(sys.modules, "pyopencl", None)
    monkeypatch.setattr(opencl_library.ctypes, "CDLL", refuse)
    with pytest.raises(BackendUnavailable) as caught:
        opencl_devices.open_device(None, {})
    message = str(caught.value)
    assert message.startswith("opencl: no pyopencl (")
    assert "pip install 'expertswarm[opencl]'; there is no libOpenCL.so; install" in message
    assert "\n" not in message


@pytest.mark.parametrize(("code", "kind"), [(-4, DeviceMemoryError), (-6, DeviceMemoryError), (-36, DeviceError)])
def test_memory_that_lacks_only_when_it_is_used(code: int, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    need("opencl")
    device = opencl_ctypes.open_device(environ={})
    module, buffer = device.build(SOURCE, DEFINES), device.alloc(24 * WIDTH)
    do = opencl_library.Library.do

    def late(self: opencl_library.Library, name: str, *args: Any) -> None:
        if name == "clEnqueueNDRangeKernel":
            raise CallFailed(name, code)
        do(self, name, *args)

    monkeypatch.setattr(opencl_library.Library, "do", late)
    with pytest.raises(DeviceError, match=r": rounding: clEnqueueNDRangeKernel failed: CL_") as caught:
        device.launch(module, "rounding", (1, 1), WIDTH, [buffer, buffer])
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("config", "exact", "subnormals"), [(0, False, False), (0x3F, False, True), (0xBE, True, False)]
)
def test_arithmetic_is_what_the_device_says(config: int, exact: bool, subnormals: bool) -> None:
    info = opencl_devices.describe(
        DEVICES[1], version="1.0", memory_bytes=9, largest_buffer=8, work_group=7, single_fp=config, extensions=""
    )
    assert (info.divides_exactly, info.keeps_subnormals) == (exact, subnormals)
    assert (info.name, info.driver) == ("Iris Xe", "Intel 1.0")
    wanted = ["-cl-std=CL1.2", *(["-cl-fp32-correctly-rounded-divide-sqrt"] if exact else [])]
    assert opencl_devices.build_options(info) == wanted


@pytest.mark.parametrize(
    ("extensions", "has_f16"),
    [("", False), ("cl_khr_fp64 cl_khr_fp16", True), ("cl_khr_fp16_of_mine cl_khr_fp64", False)],
)
def test_f16_arithmetic_is_an_extension(extensions: str, has_f16: bool) -> None:
    info = opencl_devices.describe(
        DEVICES[1], version="1", memory_bytes=9, largest_buffer=8, work_group=7, single_fp=0, extensions=extensions
    )
    assert info.has_f16 == has_f16


def test_both_drivers_ask_for_the_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    need("opencl")
    monkeypatch.setattr(opencl_devices, "F16_EXTENSION", "cl_khr_byte_addressable_store")  # which every device has
    for module in (opencl, opencl_ctypes):
        assert module.open_device(environ={}).info.has_f16


def test_a_device_that_divides_as_it_likes_is_not_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    need("opencl")
    for module in (opencl, opencl_ctypes):
        monkeypatch.setattr(opencl_devices, "_EXACT_DIVIDE_SQRT", 1 << 30)
        device = module.open_device(environ={})
        given, made, y = device.alloc(24 * WIDTH), device.alloc(24 * WIDTH), np.empty((5, WIDTH), np.float32)
        device.write(given, np.ones((6, WIDTH), np.float32))
        device.launch(device.build(SOURCE, DEFINES), "rounding", (1, 1), WIDTH, [given, made])
        device.read(made, y)
        assert (y[4] == 0).all()
