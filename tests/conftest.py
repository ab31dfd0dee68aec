"""Fixtures that several packages' tests share."""

from __future__ import annotations

import kernels  # noqa: F401 - before numpy: it sets one BLAS thread, as in every real run

# isort: split
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from goldens import quantised_file, write_f32_models

from kernels.native import build

# A run in the background inherits that Ctrl-C is ignored, and would hand it on to the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's caches and settings, or talks to the user's server."""
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    for name in ("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the native kernels, compiled once, in the cache that all tests use."""
    environ = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "home" / "cache")}
    build.load(os.environ | environ)
    return build.cache_folder(environ)


@pytest.fixture(scope="session")
def f32_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every F32 model of the golden set, written once."""
    folder = tmp_path_factory.mktemp("archs")
    write_f32_models(folder)
    return folder


@pytest.fixture(scope="session")
def arch_model(f32_models: Path) -> Callable[[str], Path]:
    """A model file of the golden set by name."""

    def find(name: str) -> Path:
        if "-Q" in name:
            path = quantised_file(name)
            assert path is not None, name
            return path
        return f32_models / f"{name}.gguf"

    return find
