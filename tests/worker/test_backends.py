"""`worker backends`: one object, a table, and for what is absent the reason and what to install."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_cupy
import pytest

from kernels import inventory
from kernels.device import cuda, opencl, opencl_ctypes, opencl_devices
from kernels.device.interface import DeviceError, DeviceMemoryError
from kernels.device.opencl_devices import FoundDevice
from kernels.errors import BackendUnavailable
from kernels.interface import NumericClass
from kernels.inventory import Candidate, Found
from kernels.measure import Rates
from worker import backends
from worker.cli import main

RATES = Rates(
    type="Q4_K",
    layer_bytes=100,
    decode_gb_s=123.456,
    decode_rounds=7,
    prefill_gflop_s=6.789,
    prefill_rounds=3,
    prefill_experts=8,
)


def opens(device: str, memory: int = 0) -> Callable[[], Any]:
    numeric = NumericClass(name="a-class")
    return lambda: SimpleNamespace(device=device, numeric_class=numeric, threads=3, memory_bytes=memory)


def fails(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def candidate(id_: str, open_: Callable[[], Any], *, is_default: bool = False) -> Candidate:
    return Candidate(id=id_, name=f"card {id_}", is_default=is_default, open=open_)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Found]:
    """A CPU, two cards of which one is broken, and a backend that is not there."""
    found = [
        Found(backend="near", setting="", candidates=(candidate("", opens("a CPU"), is_default=True),), reason=""),
        Found(
            backend="far",
            setting="FAR_DEVICE",
            candidates=(
                candidate("0", fails(DeviceError("far: card 0: it burns"))),
                candidate("1", opens("Card One", 8_000_000_000), is_default=True),
            ),
            reason="",
        ),
        Found(backend="gone", setting="", candidates=(), reason="no driver; install gone-driver"),
    ]
    monkeypatch.setattr(backends, "look", lambda: found)
    monkeypatch.setattr(backends, "usable_memory", lambda: 16_000_000_000)
    monkeypatch.setattr(backends, "measure", lambda backend, seconds: RATES)
    return found


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["backends", "--json", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.usefixtures("machine")
def test_one_object_with_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys)
    assert found["probe_seconds"] == 2
    near, far, gone = found["backends"]
    assert (near["available"], near["reason"], near["setting"]) == (True, None, None)
    assert near["devices"] == [
        {
            "id": None,
            "device": "a CPU",
            "is_default": True,
            "memory_bytes": 16_000_000_000,
            "class": "a-class/f32/f32",
            "threads": 3,
            "type": "Q4_K",
            "layer_bytes": 100,
            "decode_gb_s": 123.456,
            "decode_rounds": 7,
            "prefill_gflop_s": 6.789,
            "prefill_rounds": 3,
            "prefill_experts": 8,
            "error": None,
        }
    ]
    assert (far["available"], far["reason"], far["setting"]) == (True, None, "FAR_DEVICE")
    broken, good = far["devices"]
    assert (broken["id"], broken["device"], broken["error"]) == ("0", "card 0", "card 0: it burns")
    assert broken["decode_gb_s"] is broken["class"] is None
    assert (good["id"], good["device"], good["memory_bytes"]) == ("1", "Card One", 8_000_000_000)
    assert (broken["is_default"], good["is_default"]) == (False, True)
    assert gone == {
        "backend": "gone",
        "available": False,
        "reason": "no driver; install gone-driver",
        "setting": None,
        "devices": [],
    }


@pytest.mark.usefixtures("machine")
def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[:3] == [
        "backend  device     memory  decode GB/s  prefill GFLOP/s  class",
        "near     a CPU     16.0 GB          123             6.79  a-class/f32/f32",
        "far 1    Card One   8.0 GB          123             6.79  a-class/f32/f32",
    ]
    assert lines[-3:] == [
        "far 0: card 0: card 0: it burns",
        "far: FAR_DEVICE chooses the device, by 0, 1 or a part of its name; 1 is taken",
        "gone: no driver; install gone-driver",
    ]


def test_nothing_is_measured_in_no_time(
    machine: list[Found], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "measure", fails(AssertionError("measured")))
    near, far, _ = as_json(capsys, "--probe-seconds", "0")["backends"]
    assert near["devices"][0]["decode_gb_s"] is near["devices"][0]["type"] is None
    assert far["devices"][1]["class"] == "a-class/f32/f32"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DeviceMemoryError("card: no memory for a buffer of 9 bytes"), "card: no memory for a buffer of 9 bytes"),
        (MemoryError(), "this machine has no memory for the experts"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_a_device_that_fails_while_it_is_measured(
    error: Exception, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "measure", lambda backend, seconds: fails(error)())
    near, far, _ = as_json(capsys)["backends"]
    for backend, one in ((near, near["devices"][0]), (far, far["devices"][1])):
        assert (backend["available"], backend["reason"]) == (False, None)
        assert (one["error"], one["class"], one["decode_gb_s"]) == (told, "a-class/f32/f32", None)


@pytest.mark.usefixtures("machine")
def test_the_seconds_are_handed_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()
    monkeypatch.setattr(backends, "measure", lambda backend, seconds: (asked.append(seconds), RATES)[1])
    as_json(capsys, "--probe-seconds", "0.25")
    assert asked == [0.25, 0.25]


@pytest.mark.parametrize("seconds", ["-1", "601", "nan"])
def test_seconds_that_cannot_be(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--probe-seconds", seconds]) == 2
    assert capsys.readouterr().err == f"worker: error: --probe-seconds {seconds}: between 0 and 600\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("machine")
def test_progress_is_for_terminals() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    backends.collect(1.0, terminal)
    backends.collect(1.0, pipe)
    assert [part for part in terminal.getvalue().split("\r\x1b[K") if part] == [
        "measuring near",
        "measuring far 0",
        "measuring far 1",
    ]
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert pipe.getvalue() == ""


# ---- what there is


def found_device(platform: int, device: int, name: str, *, is_gpu: bool = False) -> FoundDevice:
    return FoundDevice(platform=platform, device=device, name=name, platform_name="P", is_gpu=is_gpu, handle=None)


def test_every_opencl_device_is_a_candidate_and_a_gpu_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [found_device(0, 0, "CPU"), found_device(1, 0, "Adreno", is_gpu=True), found_device(1, 1, "DSP")]
    opened = list[str | None]()
    monkeypatch.setattr(opencl, "list_devices", lambda: listed)
    monkeypatch.setattr(opencl_devices, "open_device", lambda wanted, environ: fails(DeviceError(wanted))())
    (found,) = [one for one in inventory.look({}) if one.backend == "opencl"]
    assert found.setting == "EXPERTSWARM_OPENCL_DEVICE"
    assert [(c.id, c.name, c.is_default) for c in found.candidates] == [
        ("0:0", "CPU", False),
        ("1:0", "Adreno", True),
        ("1:1", "DSP", False),
    ]
    for one in found.candidates:  # each opens its own device
        with pytest.raises(DeviceError) as caught:
            one.open()
        opened.append(str(caught.value))
    assert opened == ["0:0", "1:0", "1:1"]
    (chosen,) = [one for one in inventory.look({"EXPERTSWARM_OPENCL_DEVICE": "dsp"}) if one.backend == "opencl"]
    assert [c.id for c in chosen.candidates if c.is_default] == ["1:1"]


def test_our_own_binding_lists_where_pyopencl_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [found_device(0, 0, "Mali", is_gpu=True)]
    monkeypatch.setattr(opencl, "list_devices", fails(BackendUnavailable("opencl: no pyopencl; pip install it")))
    monkeypatch.setattr("kernels.device.opencl_library.load", lambda environ: None)
    monkeypatch.setattr(opencl_ctypes, "list_devices", lambda library: listed)
    assert opencl_devices.list_devices({}) == listed
    monkeypatch.setattr(opencl, "list_devices", list)  # there, but it finds nothing
    assert opencl_devices.list_devices({}) == listed
    monkeypatch.setattr(opencl_ctypes, "list_devices", lambda library: [])
    (found,) = [one for one in inventory.look({}) if one.backend == "opencl"]
    assert found.candidates == ()
    assert found.reason.startswith("there is no OpenCL device; install your GPU's OpenCL driver")


def test_every_cuda_device_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "list_devices", lambda: ["H200", "A10"])
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: fails(DeviceError(f"opened {index}"))())
    (found,) = [one for one in inventory.look({"EXPERTSWARM_CUDA_DEVICE": "a10"}) if one.backend == "cuda"]
    assert [(c.id, c.name, c.is_default) for c in found.candidates] == [("0", "H200", False), ("1", "A10", True)]
    assert found.setting == "EXPERTSWARM_CUDA_DEVICE"
    with pytest.raises(DeviceError, match="opened 0"):
        found.candidates[0].open()


def test_cuda_devices_are_opened_one_by_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.make())
    monkeypatch.setattr(backends, "look", lambda: [one for one in inventory.look({}) if one.backend == "cuda"])
    (found,) = as_json(capsys, "--probe-seconds", "0")["backends"]
    assert [(one["id"], one["device"], one["class"], one["memory_bytes"]) for one in found["devices"]] == [
        ("0", "A GPU (CUDA 13.0, CuPy 14.2.0)", "canonical-1/f32/f32", fake_cupy.MEMORY * 9 // 10),
        ("1", "Another GPU (CUDA 13.0, CuPy 14.2.0)", "canonical-1/f32/f32", fake_cupy.MEMORY * 9 // 10),
    ]


def test_what_is_absent_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    monkeypatch.setattr("kernels.device.opencl_library._candidates", lambda environ: iter(["/nowhere/libOpenCL.so"]))
    reasons = {one.backend: one.reason for one in inventory.look({})}
    assert "pip install 'expertswarm[cuda]'" in reasons["cuda"]
    assert "pip install 'expertswarm[opencl]'" in reasons["opencl"]
    assert "apt install pocl-opencl-icd" in reasons["opencl"]
    assert reasons["native"] == reasons["numpy"] == ""
    assert all("\n" not in reason for reason in reasons.values())


def test_no_compiler_is_told_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "native: there is no C compiler; install one"
    monkeypatch.setattr("kernels.native.build.load", fails(BackendUnavailable(reason)))
    found = {one["backend"]: one for one in as_json(capsys, "--probe-seconds", "0")["backends"]}
    assert found["native"]["available"] is False
    assert (found["native"]["reason"], found["native"]["devices"]) == ("there is no C compiler; install one", [])
    assert found["numpy"]["available"] is True
