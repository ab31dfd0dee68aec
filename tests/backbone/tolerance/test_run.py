"""`backbone tolerance run` as people type it: sides, verdicts, reports, what was stopped goes on, what is wrong is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from shared_data import ROOT

from backbone.cli import main
from backbone.tolerance import operations, report, runner
from backbone.tolerance.passage import Passage, passage_of, shipped_text

SHORT = ("--positions", "192", "--window", "64", "--prompts", "2", "--tokens", "6")
SCHEMA = json.loads((ROOT / "backbone" / "tolerance" / "report.schema.json").read_text())

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _empty_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy under which few positions say something."""
    path = tmp_path / "policy.toml"
    path.write_text("".join(f"[{kind}]\nleast_positions = 100\n" for kind in ("f32", "i16", "f16")))
    return path


@pytest.fixture
def tolerance(capsys: pytest.CaptureFixture[str], policy: Path) -> Run:
    """Runs `tolerance run --json`."""

    def run(*args: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main(["tolerance", "run", "--json", "--policy", str(policy), *SHORT, *args])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        jsonschema.validate(found, SCHEMA)
        return code, found

    return run


def states(found: dict[str, Any]) -> str:
    return "".join(
        {"pass": "p", "fail": "F", "not fit for sensitive layers": "s"}.get(level["state"], "-")
        for level in found["levels"].values()
    )


def test_numpy_and_native_pass_and_are_not_identical(tolerance: Run) -> None:
    code, found = tolerance("--a", "numpy", "--b", "native")
    assert (code, found["pass"], states(found)) == (0, True, "pppppp")
    levels = found["levels"]
    assert [levels[n]["identical"] for n in "123"] == [False, False, False]
    assert found["text"]["positions"] == levels["4"]["found"]["positions"] == 192
    assert levels["4"]["found"]["routing"]["decisions"] == 192 * 4
    assert levels["6"]["found"]["tokens"] == 192 - 3  # the last of a window has no next
    kinds = {case["case"].split()[0] for case in levels["1"]["found"]["cases"]}
    assert kinds == {"matmul", "rms_norm", "softmax", "swiglu", "experts"}
    widths = {tuple(sorted(case["b"], key=int)) for case in levels["1"]["found"]["cases"]}
    assert widths == {("1", "8", "9", "256")}
    exponent = levels["1"]["found"]["merging"]["b"]["exponent"]["exponent"]
    assert 0.3 < exponent < 0.9  # near sqrt(k), not k


@pytest.mark.parametrize("other", ["native/lanes=plain", "native/workers=native:2", "opencl"])
def test_one_class_is_identical_at_every_level(tolerance: Run, other: str) -> None:
    code, found = tolerance("--a", "native", "--b", other)
    assert (code, states(found)) == (0, "pppppp")
    assert all(level["identical"] for level in found["levels"].values())
    assert found["a"]["class"] == found["b"]["class"]
    if "workers" in other:
        assert [worker["backend"] for worker in found["b"]["workers"]] == ["native", "native"]
        cases = found["levels"]["1"]["found"]["cases"]
        assert [case["b"] is not None for case in cases] == [case["is_expert"] for case in cases]


def test_rows_on_a_half_precision_wire_have_the_same_bits_whoever_computes_them(tolerance: Run) -> None:
    code, found = tolerance("--a", "native/wire=f16", "--b", "native/workers=native:2/wire=f16", "--levels", "2,3")
    assert (code, states(found)) == (0, "-pp---")
    assert all(found["levels"][level]["identical"] for level in "23")
    assert found["b"]["class"].endswith(" wire-f16")


def test_i16_is_not_fit_for_sensitive_layers(tolerance: Run) -> None:
    code, found = tolerance("--a", "native", "--b", "native/activations=i16", "--levels", "1,3")
    assert (code, states(found)) == (0, "s-p---")
    (worst,) = (bar["value"] for bar in found["levels"]["1"]["bars"] if bar["name"] == "b expert_relative_l2")
    assert 1e-5 < worst < 3e-4


def test_rows_on_a_half_precision_wire(tolerance: Run) -> None:
    code, found = tolerance("--a", "native", "--b", "native/wire=f16", "--levels", "1,2,3")
    assert (code, states(found)) == (0, "ssp---")
    (worst,) = (bar["value"] for bar in found["levels"]["1"]["bars"] if bar["name"] == "b expert_relative_l2")
    assert 1e-4 < worst < 2e-3  # half a unit of 2^-11, twice


def test_a_policy_that_is_not_kept_is_exit_code_1(tolerance: Run, policy: Path) -> None:
    policy.write_text("[f32]\nmean_kl = 1e-30\nleast_positions = 100\n")
    code, found = tolerance("--a", "numpy", "--b", "native", "--levels", "3,4")
    assert (code, found["pass"], states(found)) == (1, False, "--Fp--")


def test_nothing_that_can_be_said_is_no_pass(tolerance: Run, policy: Path) -> None:
    policy.write_text("")
    code, found = tolerance("--a", "numpy", "--b", "native", "--levels", "4")
    assert (code, found["pass"], found["levels"]["4"]["state"]) == (1, False, "too few positions")


def test_a_report_is_made_of_its_json_alone(tolerance: Run, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = tolerance("--a", "numpy", "--b", "native", "--levels", "1,2,3,4")
    (folder,) = Path("tolerance_reports").glob("*/")
    assert folder.name == f"demo-numpy-vs-native-{found['date'][:10]}"
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(made) == {"report.json", "report.md", "drift.svg", "kl.svg", "rows.svg"}
    assert json.loads(made["report.json"]) == found
    text, index = made["report.md"].decode(), Path("tolerance_reports/README.md").read_text()
    assert "# demo: numpy vs native: pass" in text
    assert "![Drift by layer" in text
    assert f"({folder.name}/report.md)" in index
    for path in [*folder.iterdir(), Path("tolerance_reports/README.md")]:
        if path.name != "report.json":
            path.unlink()
    assert main(["tolerance", "render"]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made
    assert Path("tolerance_reports/README.md").read_text() == index


def test_two_reports_side_by_side(tolerance: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for b in ("native", "native/activations=i16"):
        tolerance("--a", "float64", "--b", b, "--levels", "1,3")
    first, second = sorted(map(str, Path("tolerance_reports").glob("*/")), key=len)
    assert main(["tolerance", "compare", first, second]) == 0
    rows = {
        line.split("  ")[0] or line.strip().split()[0]: line.split() for line in capsys.readouterr().out.splitlines()
    }
    assert main(["tolerance", "compare", first, second, "--json"]) == 0
    told = {row["what"].strip(): row for row in json.loads(capsys.readouterr().out)}
    assert float(told["mean_kl"]["ratio"]) > 100
    assert float(told["mean_kl"]["second"]) / float(told["mean_kl"]["first"]) == pytest.approx(
        float(told["mean_kl"]["ratio"]), rel=0.02
    )
    assert any("mean_kl" in line for line in rows)


def test_what_was_stopped_goes_on(
    tolerance: Run, monkeypatch: pytest.MonkeyPatch, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real, seen = runner.window, list[int]()

    def stops(a: Any, b: Any, passage: Any, number: int) -> Any:
        if number == 2 and len(seen) < 3:
            raise KeyboardInterrupt
        seen.append(number)
        return real(a, b, passage, number)

    monkeypatch.setattr(runner, "window", stops)
    args = ("--a", "numpy", "--b", "native", "--levels", "3")
    assert main(["tolerance", "run", "--policy", str(policy), *SHORT, *args]) == 1
    assert capsys.readouterr().err == "backbone: stopped; the same command goes on from here\n"
    assert not list(Path("tolerance_reports").iterdir())
    seen.append(-1)
    _, found = tolerance(*args)
    assert seen == [0, 1, -1, 2]  # the first two are not run again
    _, again = tolerance(*args)
    assert seen == [0, 1, -1, 2, 0, 1, 2]  # what has ended begins anew
    assert found["levels"]["3"]["found"] == again["levels"]["3"]["found"]


def test_a_torn_journal_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = runner.Journal(path, "key")
    journal.add("window 1", {"x": 1})
    journal.add("window 2", {"x": 2})
    path.write_bytes(path.read_bytes()[:-5])
    assert runner.Journal(path, "key").done == {"window 1": {"x": 1}}
    assert runner.Journal(path, "key").done == {"window 1": {"x": 1}}  # and it can be read after that
    assert runner.Journal(path, "another").done == {}
    path.write_bytes(b"\xff\x00nonsense\n[]\n")
    assert runner.Journal(path, "key").done == {}


def test_a_window_follows_as_routing_and_counts_from_first(tolerance: Run) -> None:
    _, found = tolerance("--a", "native", "--b", "native/activations=i16", "--levels", "2,4")
    routing = found["levels"]["4"]["found"]["routing"]
    assert routing["decisions"] == 192 * 4
    for flip in routing["flips"]:
        assert sorted(flip["a"]) != sorted(flip["b"])
        assert 0 <= flip["gap"] < 0.01


# ---- what a placement really computed


def test_a_mixed_placement_is_measured_by_class_and_worker(tolerance: Run) -> None:
    code, found = tolerance(
        "--a", "native", "--b", "native/workers=native:1,numpy:1/worker_memory=5M", "--levels", "1,3"
    )
    cases = [case for case in found["levels"]["1"]["found"]["cases"] if case["is_expert"]]
    assert {case["identical"] for case in cases} == {True, False}
    assert [found["levels"][number]["identical"] for number in "13"] == [False, False]
    assert (code, states(found)) == (0, "p-p---")
    workers = [(w["backend"], w["calls"] > 0, w["state"]) for w in found["b"]["workers"]]
    assert workers == [("native", True, "serving"), ("numpy", True, "serving")]


def test_a_placement_that_is_lost_in_the_middle_is_no_figure(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = runner.window

    def kills(a: Any, b: Any, passage: Any, number: int) -> Any:
        if number == 1:
            os.kill(b.session.swarm.pids()[0], signal.SIGKILL)
        return real(a, b, passage, number)

    monkeypatch.setattr(runner, "window", kills)
    args = ("--a", "native", "--b", "native/workers=numpy:1", "--levels", "3", "--json")
    assert main(["tolerance", "run", "--policy", str(policy), *SHORT, *args]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "is not any more what was to be measured: local-1: " in err
    monkeypatch.setattr(runner, "window", real)
    assert main(["tolerance", "run", "--policy", str(policy), *SHORT, *args]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["levels"]["3"]["identical"] is False  # nothing of what the backbone computed was kept


# ---- folders of reports


def test_somebody_elses_readme_is_left_alone(tolerance: Run, caplog: pytest.LogCaptureFixture) -> None:
    Path("README.md").write_text("MY PROJECT")
    tolerance("--levels", "6", "--out", ".")
    assert Path("README.md").read_text() == "MY PROJECT"
    assert main(["tolerance", "render", "."]) == 0
    assert Path("README.md").read_text() == "MY PROJECT"
    assert "README.md is not ours" in caplog.text


def test_another_run_of_the_same_sides_has_a_folder_of_its_own(tolerance: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for levels in ("6", "3,6", "6"):
        monkeypatch.setattr(sys, "argv", ["backbone", "tolerance", "run", "--levels", levels])
        tolerance("--levels", levels)
    first, second = sorted(Path("tolerance_reports").glob("*/"), key=lambda path: len(path.name))
    assert second.name == f"{first.name}-2"
    assert json.loads((first / "report.json").read_text())["levels"]["3"]["state"] == "not asked for"
    assert json.loads((second / "report.json").read_text())["levels"]["3"]["state"] == "pass"


def test_plots_of_another_run_are_not_shown(tolerance: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tolerance("--levels", "1,2,3")
    (folder,) = Path("tolerance_reports").glob("*/")
    assert list(folder.glob("*.svg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["tolerance", "render"]) == 0
    assert not list(folder.glob("*.svg"))
    assert "## Plots" not in (folder / "report.md").read_text()


def test_a_damaged_neighbour_stops_nothing(tolerance: Run, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path("tolerance_reports") / "x"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text('{"format":1,"levels":{"1":0,"2":0,"3":0,"4":0,"5":0,"6":0}}')
    code, found = tolerance("--levels", "6")
    assert (code, found["pass"]) == (0, True)
    assert "is no report of format 1" in caplog.text
    assert "float64" in Path("tolerance_reports/README.md").read_text()


@pytest.mark.parametrize(
    "path", ["levels", "levels 3", "levels 3 found kl", "levels 3 found values", "a", "model name"]
)
@pytest.mark.parametrize("value", [None, 0, [], "x", {}, {"mean_kl": "x"}], ids=str)
def test_a_report_with_anything_in_it_ends_in_one_line(
    path: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMITTED
    whole = json.loads(COMMITTED[0].read_text())
    *above, last = path.split()
    at = whole
    for key in above:
        at = at[key]
    at[last] = value
    Path("r.json").write_text(json.dumps(whole))
    assert main(["tolerance", "compare", "r.json", "r.json"]) in (0, 2)
    assert capsys.readouterr().err.count("\n") <= 1


def test_a_report_moves_no_cursor(tolerance: Run) -> None:
    _, found = tolerance("--levels", "6")
    found["model"]["name"] = "a\x1b[2Jb\nc"
    assert "\x1b" not in report.markdown(found)
    assert "# a [2Jb c: " in report.markdown(found)


# ---- what is kept of a run


def test_a_saved_run_that_was_replaced_is_not_gone_on_with(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = list[int](), runner.window

    def counts(a: Any, b: Any, passage: Any, number: int) -> Any:
        seen.append(number)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(a, b, passage, number)

    sides = ["--a", "saved:s", "--b", "native"]
    run = ["tolerance", "run", "--policy", str(policy), "--levels", "3", "--no-report", *sides]
    assert main(["tolerance", "save", "--a", "native", "--out", "s", *SHORT]) == 0
    monkeypatch.setattr(runner, "window", counts)
    assert main(run) == 1
    assert main(["tolerance", "save", "--a", "native", "--out", "s", *SHORT, "--prompts", "1"]) == 0
    assert main(run) == 0
    assert seen == [0, 1, 2, 0, 1, 2]


def test_windows_of_a_saved_run_fit_whatever_the_default_is(tolerance: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["tolerance", "save", "--a", "native", "--out", "s", *SHORT]) == 0
    monkeypatch.setattr("backbone.commands.tolerance.WINDOW", 8)
    monkeypatch.setattr("backbone.commands.tolerance.PROMPT_TOKENS", 4)
    code, found = tolerance("--a", "saved:s", "--b", "native", "--levels", "3", "--window", "0")
    assert (code, found["levels"]["3"]["identical"]) == (0, True)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["--a", "nmpy"],
            "--a nmpy: no backend 'nmpy'; did you mean 'numpy'?; an oracle is 'float64'; others are worker:NAME",
        ),
        (["--b", "native/activation=i16"], "--b native/activation=i16: 'activation=i16' is no KEY=VALUE of"),
        (["--b", "native/wire=f8"], "wire: 'f8' is not one of f32, f16"),
        (["--b", "native/workers=x"], "--workers x: 'x' is neither"),
        (["--b", "opencl/lanes=plain"], "lanes are native's, in one process"),
        (["--a", "float64/threads=2"], "float64 has nothing to choose"),
        (["--levels", "7"], "--levels 7: give some of 1, 2, 3, 4, 5, 6"),
        (["--positions", "0"], "--positions 0: a whole number from 2"),
        (["--positions", "9999999"], "tokens in all; give a longer --text, or --positions"),
        (["--window", "100000"], "--window 100000: from 2 to the model's context of 512"),
        (["--text", "nowhere.txt"], "--text nowhere.txt: cannot be read"),
        (["--seed", "-1"], "--seed -1: a whole number"),
        (["--tokens", "9999999"], "--tokens 9999999: at most 496 fit the model's context of 512"),
        (["--b", "native/workers=0"], "workers: names none"),
        (["--b", "native/wire=f16/wire=f32"], "wire: is given twice"),
        (["--b", "native/workers=numpy:1/worker_memory=1K"], "local-1 would hold no expert"),
        (["--b", "native\x1b[2J"], "is no BACKEND[/KEY=VALUE...]"),
        (["--b", "native/threads=" + "1" * 300], "is no BACKEND[/KEY=VALUE...]"),
    ],
)
def test_what_is_wrong_is_one_line(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tolerance", "run", "--no-report", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2, "levels": {}}', '{"format": 1, "levels": {"1": {}}}'])
def test_what_is_no_report_is_told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.json").write_text(text)
    assert main(["tolerance", "compare", "r.json", "r.json"]) == 2
    assert "r.json: is no report of format 1" in capsys.readouterr().err


def test_a_folder_without_reports_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tolerance", "render", "."]) == 2
    assert capsys.readouterr().err == "backbone: error: .: there is no report in it\n"


# ---- committed reports

COMMITTED = sorted((ROOT / "tolerance_reports").glob("*/report.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_a_committed_report_is_what_its_json_makes(path: Path, tmp_path: Path) -> None:
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    drawn = [name for name in report.PLOTS if (path.parent / f"{name}.svg").is_file()]
    assert (path.parent / "report.md").read_text() == report.markdown(report.read(path), drawn)
    assert path.parent.name.startswith(report.folder_name(report.read(path)))


def test_the_committed_index_has_every_report(tmp_path: Path) -> None:
    assert COMMITTED
    for path in COMMITTED:
        (tmp_path / path.parent.name).mkdir()
        shutil.copy(path, tmp_path / path.parent.name)
    assert report.index(tmp_path) == (ROOT / "tolerance_reports" / "README.md").read_text()


# ---- passages, inputs


def test_a_passage_has_as_many_tokens_as_asked_for() -> None:
    class Words:
        def encode(self, text: str) -> list[int]:
            return [9, *range(len(text.split()))]

    found = passage_of("t", b"a " * 100, Words(), positions=25, window=10)  # type: ignore[arg-type]
    assert [len(window) for window in found.windows] == [10, 10, 5]
    assert [window[:2] for window in found.windows] == [(9, 0), (9, 9), (9, 18)]
    assert found.positions == 25


def test_a_passage_can_be_begun() -> None:
    whole = Passage("t", "", ((1, 2, 3), (4, 5, 6), (7, 8, 9)), first=1, after=(4, 7, 0))
    assert whole.positions == 6
    assert whole.begun(3) == Passage("t", "", ((1, 2, 3), (4, 5, 6)), first=1, after=(4, 7))
    assert whole.begun(99) == whole
    assert whole.prompts(2, 2) == [(1, 2), (4, 5)]


def test_a_saved_run_is_compared_with_itself_and_with_another(tolerance: Run) -> None:
    assert main(["tolerance", "save", "--a", "native", "--out", "n.saved", *SHORT]) == 0
    code, found = tolerance("--a", "saved:n.saved", "--b", "native/workers=native:2")
    assert (code, states(found)) == (0, "pppppp")
    assert [level["identical"] for level in found["levels"].values()] == [None, True, True, True, True, True]
    code, found = tolerance("--a", "saved:n.saved", "--b", "numpy", "--positions", "64")
    assert (code, found["text"]["positions"]) == (0, 64)
    assert found["levels"]["3"]["identical"] is False


def test_the_shipped_text_is_long_enough_for_the_demo_model() -> None:
    name, data = shipped_text()
    assert name.endswith(".txt")
    assert len(data) > 100_000


def test_inputs_are_the_same_on_every_machine() -> None:
    x = operations.hidden_rows(1, "a", 3, 64)
    assert x.dtype == np.float32
    assert np.array_equal(x, operations.hidden_rows(1, "a", 3, 64))
    assert not np.array_equal(x, operations.hidden_rows(2, "a", 3, 64))
    assert np.abs(x).max(axis=0).argsort()[-2:].tolist() != []
    assert (np.abs(x) > 4).any()  # the few large columns
