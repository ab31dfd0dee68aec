"""What there is on this machine and what the settings make of it, as plain data; prints nothing, loads no weights.

What is broken is collected, never raised: a status that fails says nothing.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from archdefs import Library, load_library
from kernels.errors import KernelError
from kernels.gguf import open_gguf
from kernels.inventory import availability

from .discovery import DEMO, DEMO_NAME, list_models, resolve_model, split_parts
from .errors import UsageError
from .knobs import BY_NAME
from .local_workers import parse_workers
from .provenance import DigestCache, WeightsDigest, cache_folder, engine_sha256, engine_version, known_sha256
from .session import open_backend, open_library, open_own_backend
from .settings import Settings, survey
from .tokenizer import PRE_TOKENIZERS


def collect(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Everything `backbone status` shows; `problems` has a line for each broken thing that the settings name."""
    settings, problems = survey(args, environ)
    library = _library(settings, problems)
    folder = cache_folder(environ)
    embedded, cache = _embedded(folder, problems), DigestCache(folder)
    _check_backends(settings, problems)
    return {
        "engine": {"version": engine_version(), "sha256": engine_sha256()},
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "pyzmq": zmq.__version__,
            "libzmq": zmq.zmq_version(),
            "msgpack": ".".join(map(str, msgpack.version)),
        },
        "settings": {name: _setting(settings, name) for name in BY_NAME},
        "architectures": [
            {"name": d.name, "steps_per_layer": d.steps_per_layer, "origin": d.origin, "sha256": d.sha256}
            for d in sorted(library.definitions.values(), key=lambda d: d.name)
        ],
        "broken_definitions": [{"file": file, "errors": errors} for file, errors in library.broken.items()],
        "pre_tokenizers": sorted(PRE_TOKENIZERS),
        "backends": [
            {"name": name, "available": reason is None, "reason": reason} for name, reason in availability().items()
        ],
        "model": _model(settings, library, environ, cache, problems),
        "models": [
            {"name": model.name, "origin": model.origin, **_file(model.path, cache)} for model in list_models(environ)
        ],
        "embedded_model": embedded,
        "problems": problems,
    }


def _setting(settings: Settings, name: str) -> dict[str, Any]:
    value, source = settings[name].value, settings[name].source
    if BY_NAME[name].is_secret and value:
        value = "(set)"
    return {"value": value, "source": source, "variable": BY_NAME[name].variable}


def _library(settings: Settings, problems: list[str]) -> Library:
    """The definitions; without the operator's where their folder is missing."""
    try:
        library = open_library(settings)
    except UsageError as error:
        problems.append(str(error))
        library = load_library()
    problems += [error for errors in library.broken.values() for error in errors]
    return library


def _check_backends(settings: Settings, problems: list[str]) -> None:
    """Note the backends that the settings name and that cannot be had."""
    found, workers = list[str](), list[str]()
    try:
        workers = list(dict.fromkeys(parse_workers(settings.workers or "0", settings.backend)))
    except UsageError as error:
        found.append(str(error))
    for attempt in (partial(open_own_backend, settings), *(partial(open_backend, name, settings) for name in workers)):
        try:
            attempt()
        except UsageError as error:
            found.append(str(error))
    problems += dict.fromkeys(found)


def _model(
    settings: Settings, library: Library, environ: Mapping[str, str], cache: DigestCache, problems: list[str]
) -> dict[str, Any] | None:
    """The model that the settings name, so far as it can be had: its header is read, its weights are not."""
    try:
        path = resolve_model(settings.model, environ)
    except UsageError as error:
        problems.append(str(error))
        return None
    architecture = None
    try:
        with open_gguf(path) as file:
            architecture = file.metadata.get("general.architecture")
    except KernelError as error:
        problems.append(str(error))
    else:
        if architecture not in library.definitions:
            problems.append(f"{path}: no definition for its architecture {architecture!r}")
    shown = str(architecture) if architecture is not None else None
    return {"name": settings.model or DEMO_NAME, "architecture": shown, **_file(path, cache)}


def _file(path: Path, cache: DigestCache) -> dict[str, Any]:
    """Size and digest of a model with all its parts; None for what is not known without reading them."""
    parts = split_parts(path)
    try:
        size = sum(part.stat().st_size for part in parts)
    except OSError:
        size = None
    return {"path": str(path), "bytes": size, "sha256": known_sha256(parts, cache)}


def _embedded(folder: Path, problems: list[str]) -> dict[str, Any]:
    sha256 = WeightsDigest([DEMO], folder).result()  # a few megabytes: hashed here, once
    if not sha256:
        problems.append(f"{DEMO}: the embedded model cannot be read; install the package again")
    return {"name": DEMO_NAME, **_file(DEMO, DigestCache(folder)), "sha256": sha256 or None}
