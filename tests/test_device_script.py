"""The script for machines with a GPU, run small on an OpenCL device: what its object holds, and that faults show in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest
from device_checks import need
from scripts import load_benchmark
from shared_data import ROOT

from kernels.formats import GGMLType
from kernels.interface import F32, I32, NumericClass
from kernels.registry import make_backend

script = load_benchmark("device")
SHA256 = re.compile(r"[0-9a-f]{64}")


def run(cache: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "device.py"), *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=290, check=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: Path) -> dict[str, Any]:
    """The object of a quick run."""
    need("opencl")
    out = tmp_path_factory.mktemp("device") / "out.json"
    done = run(tmp_path_factory.getbasetemp() / "home" / "cache", "--backend", "opencl", "--quick", "--out", str(out))
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(out.read_text())
    return loaded


def test_it_says_what_it_ran_on(found: dict[str, Any]) -> None:
    machine = found["machine"]
    assert machine["backend"] == "opencl"
    assert machine["device"] == make_backend("opencl").device
    assert machine["memory_bytes"] > 1 << 28
    assert machine["numeric_class"] == machine["native_class"] == "canonical-1/f32/f32"
    assert SHA256.fullmatch(machine["engine_sha256"])
    assert {"python", "numpy"} <= machine["versions"].keys()
    assert found["quick"] is True
    assert found["seconds"] > 0
    assert found["pass"] is True


def test_experts_of_every_type_and_width(found: dict[str, Any]) -> None:
    experts = found["experts"]
    assert experts["holds"] is True
    assert experts["types"].keys() == {kind.name for kind in GGMLType}
    for name, type_ in experts["types"].items():
        assert type_["holds"] is type_["equals_mixed"] is True, name
        assert list(type_["widths"]) == ["1", "8", "9", "256"]
        for width in type_["widths"].values():
            assert width["equals_native"] is width["repeats"] is width["equals_wider"] is width["holds"] is True, name
            assert width["sha256"] == width["native_sha256"]
            assert 0 < width["median_relative_l2"] <= width["worst_relative_l2"] < 1e-6
            assert 1 - 1e-9 < width["least_cosine"] <= 1
            assert width["largest_difference"] > 0
    digests = [width["sha256"] for type_ in experts["types"].values() for width in type_["widths"].values()]
    assert len(set(digests)) == len(digests)
    # The inputs are the same on every machine, and so are the bits of the canonical class.
    assert experts["types"]["Q4_K"]["widths"]["9"]["sha256"][:16] == "d84824e09025da2f"


def test_every_operation(found: dict[str, Any]) -> None:
    operations = found["operations"]
    assert operations["holds"] is True
    others = {f"matmul_{kind.name}" for kind in GGMLType}
    others |= {f"attention{ending}" for ending in ("", "_window", "_softcap", "_sinks")}
    words = (
        "rms_norm norm_heads softmax sigmoid silu gelu gelu_tanh relu softcap scale add_bias add mul rope rope_pairs"
    )
    assert operations["cases"].keys() == others | set(words.split())
    for name, case in operations["cases"].items():
        assert case["equals_native"] is case["repeats"] is case["holds"] is True, name
        assert case["worst_relative_l2"] < 2e-6, name


def test_speed_is_told_beside_copies(found: dict[str, Any]) -> None:
    copy = found["copy"]
    assert copy["bytes"] == script.QUICK.copied
    assert min(copy[name] for name in ("device_gb_s", "to_device_gb_s", "from_device_gb_s")) > 0
    one = found["throughput"]["Q4_K"]
    assert one["backend"]["decode_of_copy"] == pytest.approx(one["backend"]["decode_gb_s"] / copy["device_gb_s"])
    for which in ("backend", "native"):
        assert one[which]["decode_gb_s"] > 0
        assert one[which]["prefill_gflop_s"] > 0


def test_a_swarm_with_the_device_answers_as_one_process(found: dict[str, Any]) -> None:
    swarm = found["swarm"]
    assert len(swarm["ids"]) == script.QUICK.tokens
    one_class, mixed = swarm["runs"]["one_class"], swarm["runs"]["mixed"]
    assert [worker["backend"] for worker in one_class["workers"]] == ["opencl", "native"]
    assert all(worker["calls"] for worker in one_class["workers"])
    assert one_class["equal_ids"] is one_class["equal_logits"] is one_class["holds"] is True
    assert [worker["backend"] for worker in mixed["workers"]] == ["opencl", "native", "numpy"]
    assert len({worker["class"] for worker in mixed["workers"]}) == 2
    assert mixed["equal_ids"] is mixed["holds"] is True


# ---- faults show


class Faulty:
    """The native backend, with rows that are changed on their way."""

    def __init__(self, change: Any) -> None:
        self._backend, self._change = make_backend("native"), change
        self.name, self.device, self.threads, self.memory_bytes = "faulty", "a device", 1, 0
        self.numeric_class = NumericClass(name="canonical-1")

    def load(self, experts: Any) -> Any:
        bank, change = self._backend.load(experts), self._change

        class Bank:
            def rows(self, x: F32, pairs: I32) -> F32:
                rows = bank.rows(x, pairs)
                change(rows)
                return rows

        return Bank()


SMALL = script.Size(width=256, hidden=256)


def q8_0(change: Any, *, is_one_class: bool = True) -> dict[str, Any]:
    faulty: Any = Faulty(change)
    found: dict[str, Any] = script.one_type(faulty, make_backend("native"), SMALL, GGMLType.Q8_0, is_one_class)
    return found


def test_a_backend_without_faults_holds() -> None:
    assert q8_0(lambda rows: None)["holds"] is True


def test_one_bit_is_too_much_within_a_class_and_fine_beyond() -> None:
    def last_bit(rows: F32) -> None:
        rows.view(np.uint32)[0, 0] ^= 1

    found = q8_0(last_bit)
    assert found["holds"] is found["widths"]["1"]["equals_native"] is False
    assert found["widths"]["1"]["repeats"] is True
    other = q8_0(last_bit, is_one_class=False)
    assert other["widths"]["8"]["equals_native"] is False
    assert other["widths"]["8"]["holds"] is True


def test_rows_that_are_off_fail_in_any_class() -> None:
    def off(rows: F32) -> None:
        rows[-1] *= np.float32(1 + 1e-4)

    one = q8_0(off, is_one_class=False)["widths"]["9"]
    assert one["holds"] is False
    assert one["worst_relative_l2"] == pytest.approx(1e-4, rel=0.01)
    assert one["median_relative_l2"] < 1e-6


def test_bits_that_depend_on_the_call_show() -> None:
    def by_width(rows: F32) -> None:
        if len(rows) in (8, 120):
            rows.view(np.uint32)[:, 0] ^= 1

    found = q8_0(by_width, is_one_class=False)
    assert (found["widths"]["8"]["equals_wider"], found["widths"]["9"]["equals_wider"]) == (False, True)
    assert found["equals_mixed"] is found["holds"] is False


def test_bits_that_change_show() -> None:
    calls = iter(range(1000))

    def at_random(rows: F32) -> None:
        rows.view(np.uint32)[0, 0] ^= next(calls) & 1

    found = q8_0(at_random, is_one_class=False)
    one = found["widths"]["1"]
    assert one["holds"] is one["repeats"] is found["holds"] is False


def test_a_row_that_is_not_finite_is_no_number_in_json() -> None:
    def broken(rows: F32) -> None:
        rows[0, 0] = np.nan

    one = q8_0(broken, is_one_class=False)["widths"]["9"]
    assert (one["worst_relative_l2"], one["largest_difference"], one["holds"]) == (None, None, False)
    json.dumps(one, allow_nan=False)


def test_a_section_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(*_: object, **__: object) -> dict[str, Any]:
        raise RuntimeError("it\nburns")

    fine = {"holds": True, "device_gb_s": 1.0}
    for name in ("experts", "copy", "throughput", "swarm"):
        monkeypatch.setattr(script, name, lambda *_, **__: fine)
    monkeypatch.setattr(script, "operations", fall)
    monkeypatch.setitem(script.OPEN, "native", None)
    found = script.report("native", script.QUICK, "0", lambda section: None)
    assert found["operations"] == {"error": "RuntimeError: it burns", "holds": False}
    assert found["experts"] == found["swarm"] == fine
    assert found["pass"] is False
    monkeypatch.setattr(script, "operations", lambda *_: fine)
    assert script.report("native", script.QUICK, "0", lambda section: None)["pass"] is True


def test_the_cuda_branch_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # CuPy's calls over the CUDA branch of the source, on this CPU: what a GPU would be asked, in small.
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.make())
    monkeypatch.setattr(script, "WIDTHS", (1, 9, 40))
    cuda, native = make_backend("cuda"), make_backend("native")
    found = script.one_type(cuda, native, script.QUICK, GGMLType.Q4_K, True)
    assert found["holds"] is True
    assert script.copy(script.OPEN["cuda"], replace(script.QUICK, copied=1 << 17))["holds"] is True
    monkeypatch.setattr(script.Kernels, "elementwise", lambda *_, **__: None)
    assert script.copy(script.OPEN["cuda"], replace(script.QUICK, copied=1 << 17))["holds"] is False
    name, case = next(script.cases(script.QUICK))
    assert name == "rms_norm"
    assert script.sha256(script.result(case, cuda)) == script.sha256(script.result(case, native))
    assert script.machine(cuda, native)["device"] == "A GPU (CUDA 13.0, CuPy 14.2.0)"


def test_no_such_device_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTSWARM_CUDA_DEVICE", "none of these")
    done = run(tmp_path, "--backend", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("device.py: error: cuda: ")
    assert done.stderr.count("\n") == 1


def answered(ids: list[int], logits: list[str], *calls: int, failures: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `generate --json` gives, as far as it is read."""
    workers = [
        {"name": f"local-{i}", "backend": "b", "class": "c", "calls": n, "seconds": 0.1, "failures": list(failures)}
        for i, n in enumerate(calls)
    ]
    return {"ids": ids, "logits_sha256": logits, "workers": workers, "timings": {}}


@pytest.mark.parametrize(
    ("answer", "equal_ids", "equal_logits", "one_class", "mixed"),
    [
        (answered([1, 2], ["a", "b"], 3, 4), True, True, True, True),
        (answered([1, 2], ["a", "c"], 3, 4), True, False, False, True),
        (answered([1, 3], ["a", "c"], 3, 4), False, False, False, False),
        (answered([1, 2], ["a", "b"], 3, 0), True, True, False, False),  # a worker that did nothing
        (answered([1, 2], ["a", "b"], 3, 4, failures=("late",)), True, True, False, False),
    ],
)
def test_a_swarms_answer_is_held_to_one_process(
    answer: dict[str, Any],
    equal_ids: bool,
    equal_logits: bool,
    one_class: bool,
    mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = answered([1, 2], ["a", "b"])
    monkeypatch.setattr(script, "generate", lambda size, workers: alone if workers == "0" else answer)
    swarm = script.swarm("opencl", script.QUICK, "opencl:1,numpy:1", is_one_class=True)
    runs = swarm["runs"]
    assert [runs[name]["holds"] for name in ("one_class", "mixed")] == [one_class, mixed]
    assert (runs["mixed"]["equal_ids"], runs["mixed"]["equal_logits"]) == (equal_ids, equal_logits)
    assert swarm["holds"] is (one_class and mixed)
    assert script.swarm("opencl", script.QUICK, "numpy:1", is_one_class=False)["runs"].keys() == {"mixed"}


def test_what_the_command_refuses_is_the_result() -> None:
    found = script.swarm("opencl", script.QUICK, "gpu", is_one_class=False)
    (run_,) = found["runs"].values()
    assert run_["asked"] == "gpu"
    assert run_["refused"].startswith("backbone: error: --workers gpu:")
    assert run_["holds"] is found["holds"] is False
    assert found["ids"]
