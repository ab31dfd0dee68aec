"""The wheel holds the five packages with their data and nothing else, and works from where it is unpacked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_data import ROOT

PACKAGES = {"backbone", "worker", "protocol", "kernels", "archdefs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from a copy of the tree; hatchling is already there, so nothing is fetched."""
    pytest.importorskip("hatchling", reason="hatchling comes with the extra `dev`")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in sorted(PACKAGES):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_nothing.py").write_text("")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        yield file


def test_the_top_level_is_the_five_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == PACKAGES | {info}
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_every_file_of_the_packages_is_in_it_with_the_same_bytes(wheel: zipfile.ZipFile) -> None:
    files = {
        path.relative_to(ROOT).as_posix(): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == files.keys()
    for name, path in files.items():
        assert hashlib.sha256(wheel.read(name)).digest() == hashlib.sha256(path.read_bytes()).digest(), name


def test_the_data_that_the_packages_need_is_there(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {"backbone/demo/verse-moe-q4_k_m.gguf", "backbone/demo/NOTICE"} <= names
    definitions = "llama qwen2 gemma3 qwen3 qwen3moe qwen2moe olmoe granitemoe".split()
    assert {f"archdefs/{name}.archdef" for name in definitions} <= names
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels" / "native").glob("*.[ch]")}
    assert "kernels/native/program.c" in sources <= names


def test_no_tests_are_in_it(wheel: zipfile.ZipFile) -> None:
    for name in wheel.namelist():
        parts = Path(name).parts
        assert not {"tests", "test", "conftest.py"} & set(parts), name
        assert not parts[-1].startswith("test_"), name


def test_the_metadata_names_the_commands_and_keeps_it_off_the_index(wheel: zipfile.ZipFile) -> None:
    (entry,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    text = wheel.read(entry).decode()
    assert "backbone = backbone.start:main" in text
    assert "worker = worker.start:main" in text
    metadata = wheel.read(entry.replace("entry_points.txt", "METADATA")).decode()
    assert "Classifier: Private :: Do Not Upload" in metadata
    assert "License-Expression: MIT" in metadata
    promised = {
        extra for path in sources() for extra in re.findall(r"pip install expertswarm\[(\w+)\]", path.read_text())
    }
    assert "compiler" in promised
    assert all(f"Provides-Extra: {extra}\n" in metadata for extra in promised)


def sources() -> list[Path]:
    """Every Python file of the packages."""
    return [path for package in sorted(PACKAGES) for path in (ROOT / package).rglob("*.py")]


def test_the_unpacked_wheel_finds_its_definitions_and_its_model(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)}
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "backbone", "status", "--json"],
        cwd=tmp_path / "here",
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert [b["reason"] for b in found["backends"] if b["name"] == "native"] == [None]  # its C sources came with it
    assert found["embedded_model"]["path"].startswith(str(tmp_path / "site"))
    assert len(found["architectures"]) >= 8
