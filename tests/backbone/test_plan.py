"""`backbone plan`: its numbers against the model's own, what it says would fit does, and nothing is loaded for it."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from goldens import load

from archdefs import load_library
from backbone import machine_memory, session
from backbone.cli import main
from backbone.commands import plan as command
from backbone.discovery import DEMO
from backbone.engine import Engine
from backbone.knobs import KNOBS
from backbone.model import bind_model
from backbone.planning import Node, Statement, needs_of, state
from backbone.prediction import BACKBONE, NodeSpeed
from kernels import registry
from kernels.gguf import GGUFFile, open_gguf
from kernels.matrix import Matrix

READ = 10e9  #: bytes a second of this machine's memory, in these tests
Find = Callable[[str], Path]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine of four cores that reads READ, with 8 GB; gives the threads that were asked to read."""
    monkeypatch.chdir(tmp_path)
    for knob in KNOBS:
        monkeypatch.delenv(knob.variable, raising=False)
    asked = list[int]()

    def read(threads: int) -> float:
        asked.append(threads)
        return READ

    monkeypatch.setattr(command, "read_bytes_per_s", read)
    monkeypatch.setattr(command, "memory_bytes", lambda: 8_000_000_000)
    for module in (command, session):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    return asked


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs `plan --json`; nothing but the object is printed."""

    def run(*args: str) -> dict[str, Any]:
        code = main(["plan", "--json", *args])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return run


Planned = Callable[..., dict[str, Any]]


def text_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def is_consistent(found: dict[str, Any]) -> None:
    token, model = found["token"], found["model"]
    assert token["seconds"] == pytest.approx(token["dense"] + token["wire"] + token["straggler"])
    shares = [found["backbone"]["share"], *(node["share"] for node in found["nodes"])]
    assert sum(shares) == pytest.approx(1.0 if model["experts"] else 0.0)
    assert found["fits"] == (not found["does_not_fit"])
    for node in found["nodes"]:
        assert not node["memory_bytes"] or node["bytes"] <= node["memory_bytes"]
    assert sum(s["experts"] for s in found["shortfalls"]) in (0, found["backbone"]["experts"])


def test_the_demo_model_has_two_local_workers(planned: Planned, machine: list[int]) -> None:
    found = planned()
    is_consistent(found)
    tensors = open_gguf(DEMO).tensors
    experts = {name: info.nbytes for name, info in tensors.items() if "_exps" in name}
    assert found["model"] == {
        "name": "demo",
        "path": str(DEMO),
        "architecture": "qwen3moe",
        "layers": 4,
        "expert_layers": 4,
        "experts": 64,
        "chosen": 16,
        "bytes": sum(info.nbytes for info in tensors.values()),
        "dense_bytes": sum(info.nbytes for name, info in tensors.items() if name not in experts),
        # The head reads the whole table of embeddings, the embedding one row of it.
        "dense_read_bytes": sum(info.nbytes for name, info in tensors.items() if name not in experts)
        + tensors["token_embd.weight"].nbytes // 4096,
        "expert_bytes": sum(experts.values()),
        "context": 512,
        "kv_bytes": 512 * 4 * (2 * 64 + 2 * 64) * 4,
    }
    assert [(n["name"], n["backend"], n["class"]) for n in found["nodes"]] == [
        ("local-1", "native", "canonical/f32"),
        ("local-2", "native", "canonical/f32"),
    ]
    assert machine == [4]
    for node in found["nodes"]:
        assert (node["experts"], node["bytes"], node["bytes_to_send"]) == (64, sum(experts.values()), 0)
        assert node["share"] == pytest.approx(0.5)
        assert node["bytes_per_s"] == pytest.approx(READ / 2 * command.OF_A_PLAIN_READ_COMPILED)
    assert (found["fits"], found["backbone"]["experts"], found["backbone"]["share"]) == (True, 0, 0.0)
    speed = READ * command.OF_A_PLAIN_READ_COMPILED
    # Four chosen in each layer, two for each worker; a worker has half of the cores.
    assert found["token"]["dense"] == pytest.approx(found["model"]["dense_read_bytes"] / speed)
    assert found["token"]["straggler"] == pytest.approx(sum(experts.values()) / 16 * 2 / (speed / 2))
    assert found["token"]["wire"] == pytest.approx(4 * command.LOCAL_CALL_S)
    assert any("10.0 GB/s" in line and "measured" in line for line in found["assumed"])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3moe", "granitemoe", "mixtral"])
def test_keys_and_values_are_what_a_sequence_takes(planned: Planned, arch_model: Find, name: str) -> None:
    model = load(arch_model(name), backend="numpy")
    engine = Engine(model, model.local_experts, context=256)
    sequence = engine.new_sequence()
    engine.step(sequence, 1)  # a cache grows by 256 positions
    assert planned("-m", str(arch_model(name)), "-c", "256")["model"]["kv_bytes"] == sequence.nbytes
    halves = planned("-m", str(arch_model(name)), "-c", "256", "--kv-cache", "f16")["model"]["kv_bytes"]
    assert halves == sequence.nbytes // 2


@pytest.mark.parametrize("name", ["qwen2moe", "olmoe", "mixtral"])
def test_what_a_token_asks_for_is_what_the_router_chooses(arch_model: Find, name: str) -> None:
    bound = bind_model(arch_model(name), load_library())
    needs = needs_of(bound, context=16, kv_cache="f32")
    metadata = bound.gguf.metadata
    prefix = metadata["general.architecture"]
    assert set(needs.chosen.values()) == {int(metadata[f"{prefix}.expert_used_count"])}
    assert {len(sizes) for sizes in needs.expert_bytes.values()} == {int(metadata[f"{prefix}.expert_count"])}
    assert set(needs.row_bytes.values()) == {(4 * int(metadata[f"{prefix}.embedding_length"]),) * 2}
    assert needs.all_expert_bytes == sum(i.nbytes for n, i in bound.gguf.tensors.items() if "_exps" in n)
    assert needs.dense_bytes + needs.all_expert_bytes == needs.nbytes


def test_nothing_is_loaded_compiled_or_started(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("not for a plan")

    monkeypatch.setattr(registry, "BACKENDS", dict.fromkeys(registry.BACKENDS, refuse))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(Matrix, "of", refuse)
    monkeypatch.setattr(GGUFFile, "data", lambda self, name: Unreadable(self.tensors[name].nbytes))
    assert planned("--workers", "native:1,cuda:1,numpy:1")["model"]["experts"] == 64


class Unreadable:
    """Bytes that have a length and can be cut, and that is all."""

    def __init__(self, length: int) -> None:
        self._length = length

    @property
    def data(self) -> Unreadable:
        return self

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Unreadable:
        return Unreadable(len(range(self._length)[part]))


def test_workers_of_several_backends_share_the_cores(planned: Planned) -> None:
    found = planned("--workers", "numpy:1,native:2", "--threads", "8")
    is_consistent(found)
    assert [(n["name"], n["backend"], n["class"]) for n in found["nodes"]] == [
        ("local-1", "numpy", "numpy/f32"),
        ("local-2", "native", "canonical/f32"),
        ("local-3", "native", "canonical/f32"),
    ]
    one, two, three = (n["bytes_per_s"] for n in found["nodes"])
    assert one == pytest.approx(READ / 8 * command.OF_A_PLAIN_READ["numpy"])
    assert two == three == pytest.approx(READ / 8 * 2 * command.OF_A_PLAIN_READ_COMPILED)
    assert found["nodes"][0]["experts"] < found["nodes"][1]["experts"]


def test_what_would_make_it_fit_does(planned: Planned) -> None:
    found = planned("--worker-memory", "3M")
    is_consistent(found)
    (short,) = found["shortfalls"]
    assert (found["fits"], short["workers"], short["memory_bytes"]) == (False, ["local-1", "local-2"], 6_000_000)
    assert short["experts"] == found["backbone"]["experts"] > 0
    assert short["bytes"] == found["backbone"]["expert_bytes"]
    assert found["backbone"]["share"] == pytest.approx(short["experts"] / 64, abs=0.02)
    assert found["does_not_fit"][0].startswith(f"{short['experts']} of 64 experts (")
    enough = 3_000_000 + short["more_each_bytes"]
    after = planned("--worker-memory", str(enough))
    assert (after["fits"], after["shortfalls"], after["backbone"]["share"]) == (True, [], 0.0)
    assert not planned("--worker-memory", str(3_000_000 + short["bytes"] // 2 - 200_000))["fits"]


def test_rows_in_f16_take_less_time_on_the_wire(planned: Planned) -> None:
    full, half = (planned("--node", "phone=500M@12.5", "--wire", wire)["token"] for wire in ("f32", "f16"))
    assert 0 < half["wire"] < full["wire"]
    assert (half["dense"], half["straggler"]) == (full["dense"], full["straggler"])


def test_nodes_on_other_machines(planned: Planned) -> None:
    found = planned("--node", "gpu=2M@600/other/f16", "--node", "phone=5M@12.5", "--node", "box=0", "--workers", "1")
    is_consistent(found)
    local, gpu, phone, box = found["nodes"]
    assert (gpu["name"], gpu["memory_bytes"], gpu["bytes_per_s"], gpu["class"]) == (
        "gpu",
        2_000_000,
        600e9,
        "other/f16",
    )
    assert (phone["bytes_per_s"], phone["class"]) == (12.5e9, "canonical/f32")
    assert (box["memory_bytes"], box["bytes_per_s"]) == (0, None)
    assert (gpu["latency_s"], gpu["wire_bytes_per_s"]) == (command.NETWORK_CALL_S, command.NETWORK_BYTES_PER_S)
    assert (local["latency_s"], local["wire_bytes_per_s"]) == (command.LOCAL_CALL_S, None)
    # What is sent: all that a worker elsewhere is given; this machine's maps the file.
    assert [n["bytes_to_send"] for n in found["nodes"]] == [0, gpu["bytes"], phone["bytes"], box["bytes"]]
    assert any(line.startswith("box: as fast as the median") for line in found["assumed"])
    # With nodes of its own the demo model needs no local workers.
    assert [n["name"] for n in planned("--node", "gpu=2M@600")["nodes"]] == ["gpu"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--node", "gpu"), "--node 'gpu': is not NAME=MEMORY[@GBPS][/CLASS], such as"),
        (("--node", "=3G"), "--node '=3G': is not NAME="),
        (("--node", "a=3G/"), "--node 'a=3G/': is not NAME="),
        (("--node", "a\x1b=3G"), "--node 'a\\x1b=3G': is not NAME="),
        (("--node", "a=much"), "--node 'a=much': 'much' is not a size such as 800M or 2GiB"),
        (("--node", "a=1G@fast"), "--node 'a=1G@fast': 'fast' is no number of GB/s above 0"),
        (("--node", "a=1G@nan"), "'nan' is no number of GB/s above 0"),
        (("--node", "a=1G@-1"), "'-1' is no number of GB/s above 0"),
        (("--node", "a=1G@1e999"), "'1e999' is no number of GB/s above 0"),
        (("--node", "a=1G", "--node", "a=2G"), "--node 'a=2G': the name 'a' is taken"),
        (("--node", "local-1=1G"), "the name 'local-1' is taken"),
        (("--node", "backbone=1G"), "the name 'backbone' is taken"),
        (("--workers", "nativ:2"), "no backend 'nativ'; did you mean 'native'?"),
        (("--backend", "abacus"), "no backend 'abacus'; there are native"),
        (("--workers", "x"), "--workers x: 'x' is neither a number nor BACKEND:NUMBER"),
        (("-m", "nowhere.gguf"), "no model 'nowhere.gguf'"),
    ],
)
def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    assert main(["plan", *args]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("backbone: error: ")
    assert message in err


def test_a_dense_model_leaves_workers_nothing_to_do(
    planned: Planned, arch_model: Find, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned("-m", str(arch_model("llama")), "--workers", "2")
    is_consistent(found)
    assert [(n["experts"], n["share"]) for n in found["nodes"]] == [(0, 0.0)] * 2
    assert (found["token"]["wire"], found["token"]["straggler"], found["fits"]) == (0.0, 0.0, True)
    assert "a dense model: workers have nothing to do" in text_of(capsys, "-m", str(arch_model("llama")))


def test_a_named_model_has_no_workers_unless_asked(
    planned: Planned, arch_model: Find, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(arch_model("qwen3moe"))
    found = planned("-m", path)
    is_consistent(found)
    assert (found["nodes"], found["backbone"]["share"], found["fits"], found["shortfalls"]) == ([], 1.0, True, [])
    assert found["backbone"]["experts"] == found["model"]["experts"]
    assert "no workers: the backbone computes all experts" in text_of(capsys, "-m", path)


def test_keys_and_values_that_no_memory_holds_are_told(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "memory_bytes", lambda: 1_396_224 + 300 * 4096)
    (line,) = (found := planned())["does_not_fit"]
    assert line.endswith("it takes at most -c 300, or -c 600 with --kv-cache f16")
    assert not found["fits"]
    assert planned("-c", "300")["fits"]
    assert planned("-c", "512", "--kv-cache", "f16")["fits"]
    (line,) = planned("-c", "601", "--kv-cache", "f16")["does_not_fit"]
    assert line.endswith("it takes at most -c 600")
    monkeypatch.setattr(command, "memory_bytes", lambda: 1_000_000)
    assert planned()["does_not_fit"][0].endswith("it takes a machine with more")
    monkeypatch.setattr(command, "memory_bytes", lambda: 0)  # the system does not say
    assert planned()["fits"]


def test_the_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text_of(capsys, "--workers", "2", "--worker-memory", "3M", "--node", "phone=1M@12")
    lines = shown.splitlines()
    assert lines[0].startswith("model demo (qwen3moe): 4 layers, dense 1.4 MB, 64 experts 7.7 MB (4 of 16 a token and")
    assert lines[1].split() == ["node", "class", "GB/s", "memory", "bytes", "experts", "calls", "to", "send"]
    assert [line.split()[0] for line in lines[2:6]] == ["local-1", "local-2", "phone", "backbone"]
    assert lines[2].split()[1:5] == ["canonical/f32", "1.50", "3.0", "MB"]
    (predicted,) = (line for line in lines if line.startswith("predicted: a token takes "))
    assert all(f"{part} " in predicted for part in ("dense", "wire", "straggler"))
    assert any(line.startswith("does not fit: ") and "more for each of 3, or" in line for line in lines)
    assert sum(line.startswith("assumed: ") for line in lines) == 5
    assert "everything fits" in text_of(capsys).splitlines()


def stated(*nodes: Node, usage: dict[tuple[int, int], int] | None = None) -> Statement:
    bound = bind_model(DEMO, load_library())
    needs = needs_of(bound, context=512, kv_cache="f32")
    return state(needs, nodes, NodeSpeed(name=BACKBONE, bytes_per_s=1e9), usage=usage)


def test_live_nodes_bring_what_they_hold_and_the_use_so_far() -> None:
    half = {layer: range(8) for layer in range(4)}
    rest = {layer: range(8, 16) for layer in range(4)}
    a = Node(name="a", numeric_class="x", bytes_per_s=1e9, held=half)
    b = Node(name="b", numeric_class="x", bytes_per_s=1e9, held=rest)
    found = stated(a, b)
    assert found.plan.moves == {"a": 0, "b": 0}
    hot = {(layer, expert): 10_000 for layer in range(4) for expert in range(4)}
    used = stated(a, b, usage=hot)
    # The four that are always asked for are split up, so that neither computes all of them.
    assert 0 < used.plan.moves["b"] < used.needs.all_expert_bytes / 2
    assert used.prediction.straggler_s < found.prediction.straggler_s
    assert used.prediction.shares["a"] < 0.75  # without it a would compute nearly all


def test_a_node_of_unknown_speed_is_the_median_of_the_others_or_the_backbone() -> None:
    unknown = Node(name="c", numeric_class="x")
    alone = stated(unknown)
    assert alone.prediction.straggler_s == pytest.approx(alone.needs.all_expert_bytes / 4 / 1e9)
    others = [Node(name=name, numeric_class="x", bytes_per_s=speed) for name, speed in (("a", 1e9), ("b", 3e9))]
    found = stated(*others, unknown)
    bytes_of = [found.held(name)[1] for name in "abc"]
    assert bytes_of[0] < bytes_of[2] < bytes_of[1]


def test_memory_is_read_by_as_many_threads_as_asked_each_its_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "BLOCK_BYTES", 1 << 16)
    for threads in (1, 3):
        assert 0 < machine_memory.read_bytes_per_s(threads, seconds=0) < math.inf
    assert machine_memory.memory_bytes() > 0
    monkeypatch.setattr("os.sysconf", lambda name: -1)
    assert machine_memory.memory_bytes() >= 0
