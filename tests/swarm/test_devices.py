"""OpenCL workers among others: the same bits as native's, and a device that fails costs its calls, never the answer."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import bits, greedy
from device_kit import needs_opencl
from faulty_device import FaultyDevice
from goldens import Golden, load
from swarm_kit import NEVER_S, NoLocal, faulty

from backbone.discovery import DEMO
from backbone.experts import LocalExperts
from backbone.local_workers import WorkerSpec
from backbone.model import Model
from backbone.swarm import Swarm
from kernels.device.backend import DeviceBackend
from kernels.device.interface import DeviceError
from kernels.device.opencl_devices import open_device
from kernels.interface import Options
from kernels.registry import make_backend, stand_in

pytestmark = needs_opencl()
Find = Callable[[str], Path]
FAMILIES = ["qwen3moe", "qwen2moe", "olmoe", "granitemoe", "mixtral", "qwen3moe-Q8_0", "qwen3moe-k256-Q4_K_M"]
DEMO_TOKENS = [5, 300, 41, 7, 1000, 12, 450, 8, 77, 2000]


def swarm(model: Model, workers: Sequence[str], **options: Any) -> Swarm:
    specs = [WorkerSpec(backend=name, threads=1) for name in workers]
    return Swarm(model, specs, **({"local": NoLocal(), "hedge_s": NEVER_S} | options))


@pytest.fixture(params=[*FAMILIES, "the demo model"])
def model_and_tokens(request: pytest.FixtureRequest, arch_model: Find) -> tuple[Model, list[int]]:
    if request.param == "the demo model":
        return load(DEMO, backend="native"), DEMO_TOKENS
    tokens = Golden(request.param).data()["tokens"].tolist()[:14]
    return load(arch_model(request.param), backend="native"), tokens


def test_a_device_without_f16_is_not_asked_to_sum_in_it() -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "backbone",
        "generate",
        "a",
        "--workers",
        "opencl:1",
        "--accumulation",
        "f16",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "opencl: " in line
    assert line.endswith("has no F16 arithmetic, so that it sums products in f32 only")
    assert "Traceback" not in done.stderr


def test_three_backends_at_once_give_the_tokens_of_one_process(model_and_tokens: tuple[Model, list[int]]) -> None:
    model, tokens = model_and_tokens
    with swarm(model, ["numpy", "native", "opencl"]) as workers:
        assert greedy(model, workers, tokens, 10) == greedy(model, model.local_experts, tokens, 10)
        assert [report.backend for report in workers.report()] == ["numpy", "native", "opencl"]
        assert all(report.calls > 0 and report.state == "serving" for report in workers.report())


def test_native_and_opencl_give_the_bits_of_one_process_whoever_holds_what(
    model_and_tokens: tuple[Model, list[int]],
) -> None:
    model, tokens = model_and_tokens
    expected = bits(model, model.local_experts, tokens)
    for workers, share_path in (
        (["opencl", "native"], True),
        (["native", "opencl", "opencl"], False),
        (["opencl"], True),
    ):
        with swarm(model, workers, share_path=share_path) as running:
            for chunk in (1, 5, 64):
                assert bits(model, running, tokens, chunk) == expected
            assert all(report.calls > 0 for report in running.report())


@pytest.fixture
def model(arch_model: Find) -> Model:
    return load(arch_model("qwen3moe"), backend="native")


TOKENS = Golden("qwen3moe").data()["tokens"].tolist()[:14]
NAME = open_device().info.name if not pytestmark.args[0] else ""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("launch:9", r"it refused call \d+, layer \d+: .*{name}: \w+: CL_OUT_OF_RESOURCES"),
        ("gone:5", r"it refused call \d+, layer \d+: .*{name}: \w+: CL_DEVICE_NOT_AVAILABLE"),
        ("nan:7", r"call \d+, layer \d+: rows that are not finite"),
        (
            "memory:4000",
            r"it cannot load its experts: .*experts of [\d.]+ MB do not fit .*{name}: no memory for \d+ bytes",
        ),
    ],
)
def test_a_worker_whose_device_fails_costs_its_calls_alone(
    model: Model, fault: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    import re

    expected = bits(model, model.local_experts, TOKENS)
    with swarm(model, ["opencl"], local=model.local_experts, command=faulty(f"device:{fault}")) as workers:
        for chunk in (2, 64):
            assert bits(model, workers, TOKENS, chunk) == expected
        assert [report.state for report in workers.report()] == ["lost"]
        assert workers.local_calls > 0
        assert workers.class_changes == []
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert re.search("worker local-1 is lost: " + told.format(name=re.escape(NAME)), warnings[0])


def device_backend(**faults: int) -> DeviceBackend:
    device = FaultyDevice(open_device(), **faults)
    backend = DeviceBackend("opencl", device, Options())
    device.arm()
    return backend


@pytest.mark.parametrize("faults", [{"launch": 4}, {"gone": 4}, {"memory": 10_000}], ids=str)
def test_what_the_backbones_device_cannot_do_the_cpu_does(
    model: Model, faults: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    expected = bits(model, model.local_experts, TOKENS)
    weights = lambda layer: {e: model.expert(layer, e) for e in range(model.expert_count(layer))}  # noqa: E731
    experts = LocalExperts(device_backend(**faults), weights)
    experts.is_here = False  # type: ignore[misc] - the dense path stays on the CPU, the experts on the device
    assert bits(model, experts, TOKENS, 3) == expected
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert NAME in warnings[0]
    assert warnings[0].endswith("what it cannot do is computed by native")


def test_a_dense_path_on_the_device_with_experts_that_do_not_fit_there(arch_model: Find) -> None:
    path = arch_model("qwen3moe")
    model = load(path, backend="native")
    expected = bits(model, model.local_experts, TOKENS)
    whole = load(path, backend="opencl")
    dense = whole.backend
    assert isinstance(dense, DeviceBackend)
    weights = lambda layer: {e: model.expert(layer, e) for e in range(model.expert_count(layer))}  # noqa: E731
    # Of its layers the device has room for the first; the others are the CPU's, inside the same program.
    one_layer = sum(e.nbytes for e in weights(0).values())
    small = LocalExperts(device_backend(memory=one_layer + 1000), weights)
    banks = [small.bank(layer) for layer in model.expert_tensors]
    assert len({type(bank).__name__ for bank in banks}) == 2
    assert bits(whole, whole.local_experts, TOKENS, 3) == expected
    mixed = load(path, backend="opencl")
    mixed.local_experts._banks[1] = make_backend("native").load(weights(1))
    assert bits(mixed, mixed.local_experts, TOKENS, 3) == expected


def test_without_a_stand_in_of_its_class_a_failure_is_told(model: Model) -> None:
    weights = lambda layer: {e: model.expert(layer, e) for e in range(model.expert_count(layer))}  # noqa: E731
    experts = LocalExperts(device_backend(launch=1), weights, stand_in=lambda backend: None)
    with pytest.raises(DeviceError, match="CL_OUT_OF_RESOURCES"):
        experts.send(
            0, np.ones((1, 32), np.float32).repeat(model.expert_width(0) // 32, axis=1), np.array([[0]], np.int32)
        )
    assert stand_in(make_backend("numpy")) is None
    assert stand_in(make_backend("native")) is None
    found = stand_in(make_backend("opencl"))
    assert found is not None
    assert found.name == "native"
