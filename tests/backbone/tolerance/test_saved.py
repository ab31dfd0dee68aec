"""A saved run is the side that it was saved of, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outside_kit import findings, of_kind, passage, session_of, side
from tinygguf import small

from backbone.errors import UsageError
from backbone.tolerance.archive import ArchiveReader, ArchiveWriter
from backbone.tolerance.passage import Passage
from backbone.tolerance.saved import MEMBER, save
from backbone.tolerance.sides import ModelSide, Side, Walk


def quiet(unit: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def saved(of: Side, over: Passage, path: Path, tokens: int = 6) -> Path:
    save(of, over, path, quiet, prompts=2, prompt_tokens=8, tokens=tokens)
    return path


@pytest.fixture(scope="module")
def native() -> Iterator[Side]:
    with side("native", "--a") as opened:
        yield opened


@pytest.fixture(scope="module")
def over(native: Side) -> Passage:
    """Windows of more rows than lie together, the last one shorter."""
    return passage(session_of(native), positions=150, window=100)


@pytest.fixture(scope="module")
def file(native: Side, over: Passage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(native, over, tmp_path_factory.mktemp("saved") / "native.run")


def test_it_is_the_side_that_was_saved(native: Side, over: Passage, file: Path) -> None:
    with side(f"saved:{file}", "--a") as kept:
        assert kept.passage == over
        assert (kept.numeric_class, kept.precision) == (native.numeric_class, native.precision)
        assert (kept.told["kind"], kept.told["of"], kept.told["class"]) == ("saved", "native", native.told["class"])
        found = findings(kept, native, over)
    for window, length in zip(of_kind(found, "window"), (100, 50), strict=True):
        assert window["counted"] == window["identical"] == length
        assert window["residuals_identical"] is True
        assert len(window["drift"]) == 4
        assert window["decisions"] == window["agreed"] == 4 * length
        assert window["nll_a"] == window["nll_b"] != []
    assert [one["diverged"] for one in of_kind(found, "generation")] == [None, None]
    assert [len(one["a"]) for one in of_kind(found, "generation")] == [6, 6]


def test_level_1_is_not_to_be_had(native: Side, over: Passage, file: Path) -> None:
    with side(f"saved:{file}") as kept:
        found = findings(native, kept, over, (1,))
    assert of_kind(found, "operation")
    assert all(one["a"] and one["b"] is None and not one["identical"] for one in of_kind(found, "operation"))
    assert found["merging"]["b"] is None


def test_an_oracle_keeps_its_64_bits(native: Side, tmp_path: Path) -> None:
    over = passage(session_of(native), positions=6, window=6)
    with side("float64") as oracle:
        path = saved(oracle, over, tmp_path / "oracle.run", tokens=2)
        with side(f"saved:{path}", "--a") as kept:
            assert kept.precision == "f64"
            (again,) = of_kind(findings(kept, oracle, over, (2, 3)), "window")
            (other,) = of_kind(findings(kept, native, over, (2, 3)), "window")
    assert again["identical"] == 6
    assert again["residuals_identical"] is True
    assert 0 < max(other["l_inf"]) < 1e-4


def test_routing_is_taken_from_it(native: Side, over: Passage, file: Path, tmp_path: Path) -> None:
    """With other experts than a router's own the other side goes elsewhere."""

    def turned(name: str, array: Any) -> Any:
        return array[:, ::-1] + 1 if name.endswith("ids.0") else array  # what is 16 then is no expert

    def other(name: str, array: Any) -> Any:
        return (array + 1) % 16 if "/ids." in name else array

    with pytest.raises(UsageError, match="window 1: no ids of experts"):
        _run_rewritten(native, over, file, tmp_path / "a", turned)
    (first, _) = of_kind(_run_rewritten(native, over, file, tmp_path / "b", other), "window")
    assert first["agreed"] < first["decisions"]
    assert np.mean(first["kl"]) > 1e-3


def _run_rewritten(native: Side, over: Passage, file: Path, path: Path, change: Callable[[str, Any], Any]) -> Any:
    rewrite(file, path, change)
    with side(f"saved:{path}", "--a") as kept:
        return findings(kept, native, over, (3, 4))


def rewrite(
    file: Path,
    path: Path,
    change: Callable[[str, Any], Any] = lambda name, array: array,
    content: Callable[[dict[str, Any]], object] = lambda found: None,
) -> Path:
    """A saved run with some of it changed."""
    reader = ArchiveReader(file, "")
    found = reader.json(MEMBER, 1 << 20)
    reader.close()
    content(found)
    with np.load(file, allow_pickle=False) as arrays, ArchiveWriter(path) as archive:
        for name in arrays.files:
            if name != MEMBER:
                array = change(name, arrays[name])
                if array is not None:
                    archive.array(name, array)
        archive.json(MEMBER, found)
    return path


def test_windows_are_read_when_they_are_asked_for(file: Path, over: Passage, tmp_path: Path) -> None:
    path = rewrite(file, tmp_path / "x", lambda name, array: None if name == "w1/r0/logits" else array)
    with side(f"saved:{path}", "--a") as kept:
        for number, fine in ((0, True), (1, False)):
            walk = kept.begin(number)
            assert walk is not None
            if fine:
                assert walk.run(over.windows[0][:64], None).logits.shape == (64, 4096)
            else:
                with pytest.raises(UsageError, match=r"w1/r0/logits\.npy is not there; save the run anew"):
                    walk.run(over.windows[1], None)


def test_rows_in_other_steps_are_the_same(file: Path, over: Passage) -> None:
    with side(f"saved:{file}", "--a") as kept:
        parts, whole = kept.begin(0), kept.begin(0)
        assert parts is not None
        assert whole is not None
        rows = [parts.run(over.windows[0][at : at + 30], None) for at in range(0, 100, 30)]
        piece = whole.run(over.windows[0], None)
    assert np.concatenate([row.logits for row in rows]).tobytes() == piece.logits.tobytes()
    assert np.concatenate([row.ids[2] for row in rows]).tobytes() == piece.ids[2].tobytes()


def test_what_does_not_count_is_not_kept(native: Side, over: Passage, tmp_path: Path) -> None:
    later = Passage(over.name, over.sha256, over.windows[:1], first=80, after=(7,))
    path = saved(native, later, tmp_path / "later.run")
    with np.load(path, allow_pickle=False) as arrays:
        assert [name for name in arrays.files if name.endswith("logits")] == ["w0/r64/logits"]
    with side(f"saved:{path}", "--a") as kept:
        assert kept.passage == later
        (window,) = of_kind(findings(kept, native, later, (3, 6)), "window")
    assert window["counted"] == window["identical"] == len(window["nll_a"]) == 20


def test_nothing_is_left_of_a_run_that_failed(native: Side, over: Passage, tmp_path: Path) -> None:
    class Failing(ModelSide):
        def begin(self, window: int) -> Walk:
            if window:
                raise UsageError("no more")
            return super().begin(window)

    session = session_of(native)
    failing = Failing(session, session.model.local_experts, {}, numeric_class="x", precision="f32")
    with pytest.raises(UsageError, match="no more"):
        saved(failing, over, tmp_path / "x.run")
    assert list(tmp_path.iterdir()) == []


def test_generations_that_were_not_saved(file: Path, over: Passage) -> None:
    with side(f"saved:{file}", "--a") as kept:
        whole = kept.generate(over.windows[0][:8], 6)
        assert whole is not None
        assert kept.generate(over.windows[0][:8], 3) == whole[:3]
        assert kept.generate(over.windows[0][:8], 7) is None
        assert kept.generate(over.windows[0][:7], 6) is None


def test_only_a_model_can_be_saved(file: Path, over: Passage, tmp_path: Path) -> None:
    with side(f"saved:{file}") as kept, pytest.raises(UsageError, match="only a model that is run here can be saved"):
        saved(kept, over, tmp_path / "again.run")


# ---- what is refused


def test_another_model_is_refused(native: Side, over: Passage, file: Path, tmp_path: Path) -> None:
    def changed(found: dict[str, Any]) -> None:
        found["weights"] = "0" * 64

    path = rewrite(file, tmp_path / "x", content=changed)
    with side(f"saved:{path}") as kept, side(f"saved:{file}") as mine:
        for other in (native, mine):
            with pytest.raises(UsageError, match=r"saved:.* is a run of another model \(sha256 (0000|85db)"):
                findings(other, kept, over, (3,))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["routing"]["0"].update(experts=17),
        lambda found: found["routing"]["0"].update(chosen=3),
        lambda found: found["routing"].update({"9": found["routing"]["0"]}),
        lambda found: found["routing"].pop("1"),
        lambda found: found["logits"].update(vocabulary=5000),
    ],
)
def test_a_file_that_lies_about_the_model_gets_nowhere_near_its_kernels(
    native: Side, over: Passage, file: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path = rewrite(file, tmp_path / "x", content=change)
    why = "vocabulary or routing is not that of the model"
    with side(f"saved:{path}", "--a") as kept, pytest.raises(UsageError, match=why):
        findings(kept, native, over, (3,))


def test_other_tokens_than_its_own_have_no_figures(native: Side, file: Path) -> None:
    other = Passage("x", "", ((5, 6, 7),))
    with side(f"saved:{file}", "--a") as kept, pytest.raises(UsageError, match="has no figures of these tokens"):
        findings(kept, native, other, (3,))


WRONG: Sequence[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("'format' is not 'expertswarm run' version 1", lambda found: found.update(version=2)),
    ("'format' is not", lambda found: found.pop("format")),
    ("'weights' is no sha256", lambda found: found.update(weights="x")),
    ("'weights' is no text", lambda found: found.update(weights=["x"])),
    ("'backend' is no text", lambda found: found["told"].update(backend="x\ny")),
    ("'class' is no text of at most 300", lambda found: found["told"].update({"class": "x" * 301})),
    ("'told' is no object", lambda found: found.update(told=[])),
    ("'precision' is none of f64, f32", lambda found: found.update(precision="f128")),
    ("'lengths' holds what is no number", lambda found: found["passage"].update(lengths=[100, 0])),
    ("'lengths' holds what is no number", lambda found: found["passage"].update(lengths=[100, True])),
    ("'lengths' is no list", lambda found: found["passage"].update(lengths={})),
    ("'after' is of other windows", lambda found: found["passage"].update(lengths=[], after=[])),
    ("'after' is of other windows", lambda found: found["passage"].update(after=[1])),
    ("'first' is no number from 0", lambda found: found["passage"].update(first=-1)),
    ("'chunk' is no number from 1 to 256", lambda found: found.update(chunk=2**40)),
    ("'vocabulary' is no number", lambda found: found["logits"].update(vocabulary=2**60)),
    ("'dtype' is none of <f4, <f8", lambda found: found["logits"].update(dtype="|O")),
    ("'dtype' is none of", lambda found: found["residuals"]["0"].update(dtype=[1])),
    ("'routing' is not by layer", lambda found: found["routing"].update(x={})),
    ("'routing' is not by layer", lambda found: found["routing"].update({"1": 1})),
    ("'chosen' is no number from 1 to 16", lambda found: found["routing"]["0"].update(chosen=17)),
    ("'width' is no number", lambda found: found["residuals"]["0"].update(width=1.0)),
    ("'generations' holds what is no object", lambda found: found.update(generations=[1])),
    ("'tokens' holds what is no number from 0 to 4095", lambda found: found["generations"][0].update(tokens=[4096])),
    ("'tokens' is no list of at most 6", lambda found: found["generations"][0].update(tokens=[1] * 7)),
]


@pytest.mark.parametrize(("why", "change"), WRONG)
def test_a_field_that_cannot_be_is_one_line(
    file: Path, tmp_path: Path, why: str, change: Callable[[dict[str, Any]], object]
) -> None:
    path = rewrite(file, tmp_path / "x", content=change)
    with pytest.raises(UsageError) as error, side(f"saved:{path}"):
        pass
    assert str(error.value).startswith(f"--b saved:{path}: run.json: ")
    assert why in str(error.value)


def replaced(content: dict[str, Any], by: dict[str, Any]) -> None:
    content.clear()
    content.update(by)


def test_every_field_is_missed(file: Path, tmp_path: Path) -> None:
    """Each at the top and one level below it."""
    reader = ArchiveReader(file, "")
    found = reader.json(MEMBER, 1 << 20)
    reader.close()
    paths = [(key,) for key in found] + [
        (key, inner) for key in ("passage", "logits") for inner in found[key]
    ] + [("routing", "0", key) for key in found["routing"]["0"]]  # fmt: skip
    for keys in paths:
        changed = json.loads(json.dumps(found))
        inside = changed
        for key in keys[:-1]:
            inside = inside[key]
        del inside[keys[-1]]
        path = rewrite(file, tmp_path / "x", content=partial(replaced, by=changed))
        with pytest.raises(UsageError, match="run.json: "), side(f"saved:{path}"):
            pass


def test_tokens_that_are_none(file: Path, tmp_path: Path) -> None:
    path = rewrite(file, tmp_path / "x", lambda name, array: array - 1 if name == "w0/tokens" else array)
    with pytest.raises(UsageError, match=r"w0/tokens\.npy holds no token ids"), side(f"saved:{path}"):
        pass


def test_what_is_no_saved_run(tmp_path: Path) -> None:
    path = small().write(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="is no whole archive"), side(f"saved:{path}"):
        pass
