"""`backbone status`: complete, true, and standing whatever is broken around it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tinygguf import STRING, Tiny

from archdefs import load_library
from backbone import discovery, provenance
from backbone import status as collector
from backbone.cli import main
from backbone.discovery import DEMO
from backbone.knobs import KNOBS
from backbone.tokenizer import PRE_TOKENIZERS
from kernels import registry
from kernels.errors import BackendUnavailable
from kernels.interface import Options

ARCHDEFS = Path(discovery.__file__).parents[1] / "archdefs"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_kernels: Path) -> None:
    """A home with nothing but compiled kernels, and an empty folder."""
    cache = tmp_path / "home" / ".cache" / "expertswarm"
    cache.mkdir(parents=True)
    (cache / "native").symlink_to(compiled_kernels)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    monkeypatch.setattr(discovery, "OLLAMA_SERVICE", tmp_path / "service")
    for knob in KNOBS:
        monkeypatch.delenv(knob.variable, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `status --json`; the exit code follows from the problems, and standard error is empty."""

    def run(*argv: str) -> dict[str, Any]:
        code = main(["status", "--json", *argv])
        out, err = capsys.readouterr()
        found: dict[str, Any] = json.loads(out)
        assert (code, err) == (1 if found["problems"] else 0, "")
        return found

    return run


def text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    main(["status", *argv])
    return capsys.readouterr().out


def test_versions_settings_and_tables_are_whole(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("EXPERTSWARM_PREDICT=5\n")
    monkeypatch.setenv("EXPERTSWARM_TOP_P", "0.5")
    found = status("--seed", "7")
    assert found["problems"] == []
    assert found["engine"] == {"version": provenance.engine_version(), "sha256": provenance.engine_sha256()}
    for name in ("numpy", "pyzmq", "msgpack"):
        assert found["versions"][name] == importlib.metadata.version(name)
    assert found["versions"]["libzmq"] == zmq.zmq_version()
    assert found["settings"].keys() == {knob.name for knob in KNOBS}
    assert found["settings"]["predict"] == {"value": 5, "source": ".env:1", "variable": "EXPERTSWARM_PREDICT"}
    assert found["settings"]["top_p"] == {"value": 0.5, "source": "environment", "variable": "EXPERTSWARM_TOP_P"}
    assert found["settings"]["seed"] == {"value": 7, "source": "flag --seed", "variable": "EXPERTSWARM_SEED"}
    assert found["settings"]["context"]["source"] == "default"
    assert found["pre_tokenizers"] == sorted(PRE_TOKENIZERS)
    assert found["backends"][:2] == [{"name": n, "available": True, "reason": None} for n in ("native", "numpy")]
    assert [backend["name"] for backend in found["backends"][2:]] == ["opencl", "cuda"]
    assert all(backend["available"] == (backend["reason"] is None) for backend in found["backends"])
    assert found["settings"]["backend"] == {"value": "auto", "source": "default", "variable": "EXPERTSWARM_BACKEND"}


def test_every_definition_has_steps_origin_and_the_sha256_of_its_file(status: Any) -> None:
    found = {a["name"]: a for a in status()["architectures"]}
    files = {path.stem: path for path in ARCHDEFS.glob("*.archdef")}
    assert found.keys() == files.keys()
    for name, path in files.items():
        assert found[name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert found[name]["origin"] == "built in"
        assert found[name]["steps_per_layer"] == load_library().get(name).steps_per_layer > 0


def test_the_operators_definition_is_shown_with_its_path(status: Any, tmp_path: Path) -> None:
    own = tmp_path / "qwen3.archdef"
    own.write_bytes((ARCHDEFS / "qwen3.archdef").read_bytes() + b"# ours\n")
    found = status("--archdefs", str(tmp_path))
    (shown,) = (a for a in found["architectures"] if a["name"] == "qwen3")
    assert (shown["origin"], shown["sha256"]) == (str(own), hashlib.sha256(own.read_bytes()).hexdigest())
    assert found["problems"] == []


def test_a_broken_definition_is_a_problem_with_its_place(
    status: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "qwen3.archdef"
    own.write_text((ARCHDEFS / "qwen3.archdef").read_text().replace("silu", "siluu"))
    found = status("--archdefs", str(tmp_path))
    assert "qwen3" not in {a["name"] for a in found["architectures"]}
    (broken,) = found["broken_definitions"]
    assert broken["file"] == str(own)
    assert broken["errors"] == found["problems"]
    assert all(error.startswith(f"{own}:") for error in broken["errors"])
    assert "siluu" in broken["errors"][0]
    shown = text(capsys, "--archdefs", str(tmp_path)).partition("\nproblems\n")[2]
    assert broken["errors"][0].split("\n") == [line.removeprefix("  ") for line in shown.splitlines()][:3]


def test_a_folder_of_definitions_that_cannot_be_read_is_a_problem(
    status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.iterdir

    def closed(folder: Path) -> Iterator[Path]:
        if folder == tmp_path:
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", closed)
    found = status("--archdefs", str(tmp_path))
    assert found["problems"] == [f"{tmp_path}:1:1: cannot be read: Permission denied"]
    assert found["architectures"]


def test_the_embedded_model_has_its_full_sha256(status: Any) -> None:
    found = status()
    assert found["embedded_model"] == {
        "name": "demo",
        "path": str(DEMO),
        "bytes": DEMO.stat().st_size,
        "sha256": hashlib.sha256(DEMO.read_bytes()).hexdigest(),
    }
    assert found["model"] == found["embedded_model"] | {"architecture": "qwen3moe"}


@pytest.mark.parametrize(
    ("argv", "clause"),
    [
        (("--model", "nix"), "no model 'nix'"),
        (("--archdefs", "nix"), "nix:1:1: no folder of definitions"),
        (("--archdefs", "x" * 300), "File name too long"),
        (("--backend", "nunpy"), "no backend 'nunpy'; did you mean 'numpy'?"),
        (("--workers", "nunpy:2"), "no backend 'nunpy'"),
        (("--workers", "many"), "'many' is neither"),
        (("--temp", "hot"), "--temperature: 'hot' is not a number"),
        (("--activations", "i8"), "'i8' is not one of f32, i16"),
        (("--backend", "numpy", "--activations", "i16"), "numpy computes with f32 activations only"),
        (("--backend", "numpy", "--accumulation", "f16"), "numpy sums products in f32 only"),
        (("--workers", "native:1", "--accumulation", "f16"), "native sums products in f32 only"),
        (("--backend", "numpy", "--kv-cache", "f16"), "numpy keeps keys and values in f32"),
    ],
)
def test_what_the_configuration_names_and_is_broken(
    argv: tuple[str, ...], clause: str, status: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (problem,) = status(*argv)["problems"]
    assert clause in problem
    assert f"\nproblems\n  {problem}\n" in text(capsys, *argv)


def test_settings_that_cannot_be_used_do_not_hide_the_rest(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTSWARM_TOPK", "1")
    Path(".env").write_text("EXPERTSWARM_SEED=x\nEXPERTSWARM_MODEL=nix\n")
    found = status()
    assert len(found["problems"]) == 3
    assert found["settings"]["model"]["value"] == "nix"
    assert found["model"] is None


def test_a_model_that_is_no_gguf_or_of_no_architecture_we_know(status: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"no model at all")
    (problem,) = status("-m", str(path))["problems"]
    assert problem.startswith(f"{path}: ")
    Tiny().key("general.architecture", STRING, "mystery").write(path)
    found = status("-m", str(path))
    assert found["problems"] == [f"{path}: no definition for its architecture 'mystery'"]
    assert found["model"]["architecture"] == "mystery"
    Tiny().write(path)
    assert "architecture None" in status("-m", str(path))["problems"][0]


def test_an_absent_backend_says_why(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: Options) -> Any:
        raise BackendUnavailable("needs a device")

    monkeypatch.setattr(registry, "BACKENDS", dict(registry.BACKENDS) | {"far": absent})
    found = status()
    assert {"name": "far", "available": False, "reason": "needs a device"} in found["backends"]
    assert found["problems"] == []
    assert status("--backend", "far")["problems"] == ["needs a device"]


def fill_caches(home: Path) -> tuple[Path, Path]:
    """An Ollama model, and a Hugging Face one that is named by no digest."""
    models, repo = home / ".ollama" / "models", home / ".cache" / "huggingface" / "hub" / "models--org--repo"
    blob = models / "blobs" / f"sha256-{'c' * 64}"
    manifest = models / "manifests" / "registry.ollama.ai" / "library" / "m" / "1b"
    file = repo / "snapshots" / "abc" / "m-00001-of-00002.gguf"
    for path in (blob, manifest, file):
        path.parent.mkdir(parents=True)
    blob.write_bytes(b"12345")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'c' * 64}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    file.write_bytes(b"123")
    file.with_name("m-00002-of-00002.gguf").write_bytes(b"4567")
    return blob, file


def test_models_of_the_caches_with_the_digests_that_cost_nothing(
    status: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blob, file = fill_caches(tmp_path / "home")
    ollama, hub = status()["models"]
    assert ollama == {"name": "m:1b", "origin": "ollama", "path": str(blob), "bytes": 5, "sha256": "c" * 64}
    assert hub == {
        "name": "org/repo:m-00001-of-00002.gguf",
        "origin": "huggingface",
        "path": str(file),
        "bytes": 7,
        "sha256": None,
    }
    assert "not hashed yet" in text(capsys)
    parts = [file, file.with_name("m-00002-of-00002.gguf")]
    whole = provenance.WeightsDigest(parts).result()
    assert status()["models"][1]["sha256"] == whole
    assert "not hashed yet" not in text(capsys)
    parts[1].unlink()
    assert status()["models"][1] | {"path": ""} == hub | {"path": "", "bytes": None}


def test_the_text_holds_what_the_json_holds(status: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_caches(tmp_path / "home")
    found, shown = status(), text(capsys)
    assert found["engine"]["sha256"] in shown
    assert found["embedded_model"]["sha256"] in shown
    for version in found["versions"].values():
        assert version in shown
    for setting in found["settings"].values():
        assert setting["variable"] in shown
    for architecture in found["architectures"]:
        assert architecture["sha256"] in shown
    for model in found["models"]:
        assert model["path"] in shown
    for name in found["pre_tokenizers"]:
        assert name in shown
    assert shown.endswith("problems\n  none\n")


def test_names_of_files_do_not_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, file = fill_caches(tmp_path / "home")
    file.with_name("\x1b[2J\n\udcff.gguf").write_bytes(b"")
    shown = text(capsys)
    assert "\x1b" not in shown
    assert "org/repo:\\x1b[2J\\n\\udcff.gguf" in shown
    assert main(["status", "--json"]) == 0
    assert any("\x1b" in model["name"] for model in json.loads(capsys.readouterr().out)["models"])


def test_an_embedded_model_that_is_gone_is_a_problem(
    status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "DEMO", tmp_path / "gone.gguf")
    found = status()
    assert found["embedded_model"]["sha256"] is None
    assert any(problem.startswith(f"{tmp_path / 'gone.gguf'}: the embedded model") for problem in found["problems"])


def test_a_secret_is_not_shown(
    status: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXPERTSWARM_MQTT_PASSWORD", "hidden-word")
    found = status()
    assert found["settings"]["mqtt_password"] == {
        "value": "(set)",
        "source": "environment",
        "variable": "EXPERTSWARM_MQTT_PASSWORD",
    }
    assert "hidden-word" not in json.dumps(found) + text(capsys)
