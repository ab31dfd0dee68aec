"""The comparison with llama.cpp: what a token costs, the order of the rounds, ratios, and errors in one line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import load_benchmark

from backbone.discovery import DEMO
from kernels.formats import GGMLType
from kernels.gguf import TensorInfo, open_gguf

against = load_benchmark("against_llama_cpp")


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["against_llama_cpp.py", *map(str, args)])
    code: int = against.main()
    return code


def model(*tensors: tuple[str, tuple[int, ...]]) -> Any:
    """Of F32 tensors; a token uses 2 experts."""
    found = {}
    for name, dims in tensors:
        size = 4
        for dim in dims:
            size *= dim
        found[name] = TensorInfo(name, GGMLType.F32, dims, 0, size, 0)
    return SimpleNamespace(metadata={"general.architecture": "tiny", "tiny.expert_used_count": 2}, tensors=found)


BODY = (("token_embd.weight", (8, 100)), ("blk.0.norm.weight", (8,)), ("blk.0.q.weight", (8, 16)))
EXPERTS = (("blk.0.ffn_up_exps.weight", (8, 4, 10)), ("blk.0.ffn_up_exps.bias", (4, 10)))


def test_a_token_costs_its_experts_one_embedding_and_the_head_only_in_decode() -> None:
    work = against.work_of(model(*BODY, *EXPERTS, ("output.weight", (8, 100))))
    assert work.decode_bytes == 4 * (8 + 8 + 8 * 16 + 8 * 4 * 2 + 4 * 2 + 8 * 100)
    assert work.prefill_weights == 8 * 16 + 8 * 4 * 2 + 4 * 2


def test_an_embedding_that_is_the_head_too_is_read_whole() -> None:
    work = against.work_of(model(*BODY))
    assert work.decode_bytes == 4 * (8 * 100 + 8 + 8 * 16)
    assert work.prefill_weights == 8 * 16


def test_a_quarter_of_the_demo_models_experts_is_read() -> None:
    with open_gguf(DEMO) as gguf:
        experts = sum(info.nbytes for name, info in gguf.tensors.items() if "_exps." in name)
        embedding = gguf.tensors["token_embd.weight"].nbytes
        others = sum(info.nbytes for info in gguf.tensors.values()) - experts - embedding
        row = embedding // gguf.tensors["token_embd.weight"].dims[1] if "output.weight" in gguf.tensors else embedding
        assert against.work_of(gguf).decode_bytes == experts // 4 + others + row


def test_rounds_alternate_and_ratios_are_of_medians() -> None:
    ran = list[str]()
    rates = {"llama.cpp": iter([10.0, 30.0, 20.0]), "ours": iter([50.0, 10.0, 40.0])}

    def engine(name: str) -> Any:
        def once() -> dict[str, float]:
            ran.append(name)
            return {"tg4": next(rates[name])}

        return against.Engine(name, once)

    found = against.in_turn([engine("llama.cpp"), engine("ours")], 3, lambda name, done: None)
    assert ran == ["llama.cpp", "ours", "ours", "llama.cpp", "llama.cpp", "ours"]
    can = {"read_same_gb_s": 1.0, "gemm_gflop_s": 1.0}
    rows = against.results_of(found, 1, against.Work(10_000_000, 5), can)
    assert [(row["engine"], row["median"], row["ratio"], row["of_machine"]) for row in rows] == [
        ("llama.cpp", 20.0, 1.0, 0.2),
        ("ours", 40.0, 2.0, 0.4),
    ]
    assert against.as_text(rows).splitlines()[-1].split() == "ours tg4 1 40.0 10.0 50.0 2.00x 40%".split()


def program(folder: Path, body: str) -> Path:
    path = folder / "llama-bench"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return path


def test_what_llama_bench_prints_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = program(
        tmp_path,
        "import json, os, sys\n"
        "assert 'OMP_NUM_THREADS' not in os.environ\n"
        "assert sys.argv[1:] == '-m x.gguf -p 5 -n 3 -t 2 -r 1 -o json'.split()\n"
        "print(json.dumps([{'n_prompt': 5, 'n_gen': 0, 'samples_ts': [7.0]}, "
        "{'n_prompt': 0, 'n_gen': 3, 'samples_ts': [2.5]}]))",
    )
    assert against.llama_bench(path, Path("x.gguf"), 5, 3, 2) == {"pp5": 7.0, "tg3": 2.5}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import sys\nprint('a', 'no such model', sep=chr(10), file=sys.stderr)\nsys.exit(3)", "code 3: no such model"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended with signal 9: it printed no reason"),
        ("print('hello')", "printed no JSON: 'hello'"),
    ],
)
def test_a_program_that_fails_is_one_line(
    body: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "-m", DEMO, "--llama-bench", program(tmp_path, body), "--runs", 1, "--threads", 1) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("-m", DEMO), "no llama.cpp here: give --llama-bench PATH"),
        (("-m", DEMO, "--rpc"), "--rpc needs --llama-bench PATH and --rpc-server PATH"),
        (("-m", DEMO, "--llama-bench", "/nowhere"), "/nowhere: no program that can be run"),
        (("-m", "/nowhere.gguf", "--llama-bench", sys.executable), "/nowhere.gguf: cannot be read"),
    ],
)
def test_what_is_missing_is_one_line(
    args: tuple[object, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(monkeypatch, *args) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
