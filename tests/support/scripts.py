"""Scripts that belong to no package, loaded by their path."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from shared_data import ROOT


def load_benchmark(name: str) -> ModuleType:
    """A script of `benchmarks/` as a module, without running it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
