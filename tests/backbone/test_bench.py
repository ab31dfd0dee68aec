"""`backbone bench`: what is measured, and that its figures agree with each other. How fast it is, is no test's affair."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backbone.cli import main
from backbone.clock import PARTS
from backbone.commands import bench
from backbone.discovery import DEMO
from backbone.engine import Engine
from backbone.provenance import WeightsDigest
from kernels.gguf import open_gguf
from kernels.registry import make_backend


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs `bench --json`; nothing but the object is printed."""

    def run(*args: str) -> dict[str, Any]:
        code = main(["bench", "--backend", "numpy", "--json", *args])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return run


Measured = Callable[..., dict[str, Any]]


def is_consistent(found: dict[str, Any], repetitions: int) -> None:
    for result in found["results"]:
        assert len(result["seconds"]) == len(result["tokens_per_s"]) == repetitions
        rates = [result["tokens"] / seconds for seconds in result["seconds"]]
        assert result["tokens_per_s"] == pytest.approx(rates)
        assert result["mean"] == pytest.approx(statistics.mean(rates))
        assert result["median"] == pytest.approx(statistics.median(rates))
        assert result["sd"] == pytest.approx(statistics.stdev(rates) if repetitions > 1 else 0)
        if result["test"].startswith("tg"):
            whole = sum(result["seconds"]) / (result["tokens"] * repetitions) * 1e6
            assert sum(found["split"].values()) == pytest.approx(whole)


def test_the_demo_model_in_this_process(measured: Measured) -> None:
    found = measured("-p", "6", "-n", "3", "-r", "2", "--workers", "0")
    assert [(r["test"], r["tokens"]) for r in found["results"]] == [("pp6", 6), ("tg3", 3)]
    is_consistent(found, 2)
    assert found["split"].keys() == {*PARTS, "other"}
    assert found["split"]["sampling"] > 0
    tensors = open_gguf(DEMO).tensors.values()
    assert found["size_bytes"] == sum(t.nbytes for t in tensors)
    assert found["params"] == sum(int(np.prod(t.dims)) for t in tensors)
    assert (found["model"], found["backend"], found["threads"]) == ("demo", "numpy", 1)
    assert found["class"] == found["provenance"]["backbone_class"] == str(make_backend("numpy").numeric_class)
    assert (found["workers"], found["computed_locally"]) == ([], None)
    assert len(found["provenance"]["weights"]) == 64


def test_the_demo_model_has_two_workers_unless_told_otherwise(measured: Measured) -> None:
    found = measured("-p", "4", "-n", "2", "-r", "1")
    is_consistent(found, 1)
    assert [w["state"] for w in found["workers"]] == ["serving"] * 2
    assert found["computed_locally"] == 0
    # Prefill twice (once to warm up) and decode twice, through every layer's experts.
    layers = len({name for name in open_gguf(DEMO).tensors if "ffn_gate_exps" in name})
    chosen = int(open_gguf(DEMO).metadata["qwen3moe.expert_used_count"])
    assert sum(w["rows"] for w in found["workers"]) == (4 + 4 + 2 + 2) * layers * chosen


@pytest.mark.parametrize(("args", "tests"), [(("-p", "3", "-n", "0"), ["pp3"]), (("-p", "0", "-n", "3"), ["tg3"])])
def test_zero_tokens_leave_a_test_out(measured: Measured, args: tuple[str, ...], tests: list[str]) -> None:
    found = measured(*args, "-r", "1", "--workers", "0")
    assert [r["test"] for r in found["results"]] == tests
    assert bool(found["split"]) == (tests == ["tg3"])


def test_a_dense_model_by_path(measured: Measured, arch_model: Callable[[str], Path]) -> None:
    path = arch_model("llama")
    found = measured("-m", str(path), "-p", "4", "-n", "2", "-r", "2")
    is_consistent(found, 2)
    assert (found["model"], found["workers"]) == (path.name, [])
    assert found["provenance"]["model"] == str(path)


def test_repetitions_begin_alike_after_a_warm_up(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[tuple[int, list[int], int]]()  # tokens before, tokens run, the likeliest next
    plain = Engine.extend

    def extend(self: Engine, sequence: Any, tokens: list[int], **options: Any) -> Any:
        before = len(sequence.tokens)
        logits = plain(self, sequence, tokens, **options)
        runs.append((before, list(tokens), int(np.argmax(logits[-1]))))
        return logits

    monkeypatch.setattr(Engine, "extend", extend)
    measured("-p", "5", "-n", "11", "-r", "2", "--workers", "0")
    prompts, steps = runs[:3], runs[3:]
    assert all(before == 0 and len(tokens) == 5 for before, tokens, _ in prompts)
    assert len({tuple(tokens) for _, tokens, _ in prompts}) == 1
    warm_up, first, second = steps[: bench.WARM_UP_TOKENS], steps[-22:-11], steps[-11:]
    assert len(steps) == bench.WARM_UP_TOKENS + 2 * 11
    assert first == second
    assert warm_up == first[: bench.WARM_UP_TOKENS]
    assert [before for before, _, _ in first] == list(range(11))
    assert [tokens for _, tokens, _ in first[1:]] == [[likeliest] for _, _, likeliest in first[:-1]]
    again = list(runs)
    runs.clear()
    measured("-p", "5", "-n", "11", "-r", "2", "--workers", "0")
    assert runs == again


def test_the_warm_up_is_not_on_the_clock(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine.choose

    def choose(self: Engine, *args: Any) -> int:
        if self._clock is not None:
            self._clock.add("wire", 1000)
        return plain(self, *args)

    monkeypatch.setattr(Engine, "choose", choose)
    assert measured("-p", "0", "-n", "10", "-r", "3", "--workers", "0")["split"]["wire"] == pytest.approx(1)


def test_the_weights_are_hashed_before_anything_is_measured(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()
    plain_result, plain_measure = WeightsDigest.result, bench.measure

    def result(self: WeightsDigest) -> str:
        order.append("hashed")
        return plain_result(self)

    def measure(*args: Any) -> Any:
        order.append("measured")
        return plain_measure(*args)

    monkeypatch.setattr(WeightsDigest, "result", result)
    monkeypatch.setattr(bench, "measure", measure)
    measured("-p", "2", "-n", "0", "-r", "1", "--workers", "0")
    assert order[:2] == ["hashed", "measured"]


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--backend", "numpy", "-p", "4", "-n", "2", "-r", "2", "--workers", "0"]) == 0
    out, err = capsys.readouterr()
    heading, prefill, decode, split = out.splitlines()
    assert heading.split() == list(bench.COLUMNS)
    for line, test in ((prefill, "pp4"), (decode, "tg2")):
        cells = line.split()
        assert cells[:6] == ["demo", "8.60", "MiB", "14.44", "M", "numpy"]
        assert cells[6].startswith("numpy-")
        assert cells[6].endswith("/f32/f32")
        assert cells[7:10] == ["1", "0", test]
        mean, sign, sd = cells[10:]
        assert sign == "±"
        assert float(mean) > 0 <= float(sd)
    assert split.startswith("a token of tg2 takes ")
    assert ", other " in split
    assert err.splitlines()[0] == f"class {make_backend('numpy').numeric_class}"
    assert err.splitlines()[1].startswith("weights 85dbef22393e, archdef qwen3moe")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(["bench", "--backend", "numpy", "-p", "2", "-n", "1", "-r", "2", "--workers", "0", "--json"]) == 0
    shown = terminal.getvalue().replace("\x1b[K", "").split("\r")
    assert shown == ["", "pp2: warm-up 0/2", "pp2 0/2", "pp2 1/2", "tg1: warm-up 0/2", "tg1 0/2", "tg1 1/2", ""]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-p", "0", "-n", "0"), "-p 0 and -n 0 leave nothing to measure; give one of them a number of tokens"),
        (("-p", "many"), "-p: 'many' is not a whole number"),
        (("-n", "-1"), "-n: -1 is out of range; from 0 to 1048576 is allowed"),
        (("-r", "0"), "-r: 0 is out of range; from 1 to 1000 is allowed"),
        (("-r", ""), "-r: '' is not a whole number"),
        (("--threads", "-2"), "--threads: -2 is out of range; from 0 to 1024 is allowed"),
        (("--activations", "i16"), "numpy computes with f32 activations only; i16 needs --backend native"),
        (("-m", "absent.gguf"), "no model 'absent.gguf'; looked at "),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--backend", "numpy", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"backbone: error: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("size", "params", "shown"),
    [(1 << 20, 10**6, ("1.00 MiB", "1.00 M")), (17 << 30, 30_532_000_000, ("17.00 GiB", "30.53 B"))],
)
def test_large_numbers_are_shown_small(size: int, params: int, shown: tuple[str, str]) -> None:
    assert (bench._size(size), bench._count(params)) == shown
