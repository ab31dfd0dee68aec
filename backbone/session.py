"""A loaded model with its workers, as the commands use it: settings in, an engine out; all ends with the block."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from archdefs import ArchdefError, Library, load_library
from kernels.cores import usable_cores
from kernels.errors import BackendUnavailable
from kernels.interface import DenseBackend, Options
from kernels.registry import AUTO, ON_CPU, make_backend

from .class_map import ClassMap
from .discovery import DEMO, resolve_model
from .door import Door
from .engine import Engine
from .errors import UsageError
from .experts import ExpertSource
from .local_workers import WorkerSpec, parse_workers
from .model import Model, load_model
from .provenance import WeightsDigest, engine_sha256, engine_version
from .settings import Settings
from .swarm import Swarm, WorkerReport
from .terminal import ProgressLine
from .tokenizer import Tokenizer, load_tokenizer
from .trust import Checks
from .wire import Wire

log = logging.getLogger(__name__)
DEFAULT_CONTEXT = 4096
DEMO_WORKERS = "2"


@dataclass(slots=True)
class Session:
    """What a command works with."""

    settings: Settings
    model: Model
    engine: Engine
    swarm: Swarm | None
    digest: WeightsDigest

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. TokenizerError when it is of a kind that is not known."""
        tokenizer = load_tokenizer(self.model.gguf.metadata, str(self.model.path))
        if tokenizer.size > self.model.vocabulary:
            raise UsageError(
                f"{self.model.path}: {tokenizer.size} tokens are named and the model has {self.model.vocabulary}"
            )
        return tokenizer

    def workers(self) -> list[WorkerReport]:
        """What each worker did."""
        return self.swarm.report() if self.swarm is not None else []

    def provenance(self) -> dict[str, Any]:
        """Which weights, definition, engine and classes an answer came of. Waits for the weights' sha256."""
        definition, classes = self.model.definition, self.class_map()
        return {
            "model": str(self.model.path),
            "weights": self.digest.result(),
            "archdef": {"name": definition.name, "origin": definition.origin, "sha256": definition.sha256},
            "engine": {"version": engine_version(), "sha256": engine_sha256()},
            "backbone_class": classes.dense,
            "class_map": classes.digest,
        }

    def class_map(self) -> ClassMap:
        """Which numeric class computes which expert, as it is now."""
        if self.swarm is not None:
            return self.swarm.class_map
        counts = {layer: self.model.expert_count(layer) for layer in self.model.expert_tensors}
        return ClassMap.of_backbone(str(self.model.numeric_class), counts, dense_class(self.model, self.settings))


def dense_class(model: Model, settings: Settings, wire: str = "f32") -> str:
    """The class of what the backbone computes beside experts: with it goes how keys, values and rows are carried."""
    parts = [str(model.numeric_class)]
    parts += [f"{what}-{kind}" for what, kind in (("kv", settings.kv_cache), ("wire", wire)) if kind != "f32"]
    return " ".join(parts)


def open_library(settings: Settings) -> Library:
    """The definitions there are. UsageError when the operator's folder cannot be read."""
    try:
        return load_library(Path(settings.archdefs) if settings.archdefs else None)
    except ArchdefError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{settings.archdefs}: cannot be read: {error.strerror} (EXPERTSWARM_ARCHDEFS)") from None


def _options(settings: Settings) -> Options:
    return Options(
        threads=settings.threads,
        activations=settings.activations,
        kv_cache=settings.kv_cache,
        accumulation=settings.accumulation,
    )


def open_backend(name: str, settings: Settings) -> DenseBackend:
    """A backend by name, with the settings' options. UsageError says why it cannot be had."""
    return _open_backend(name, _options(settings))


def open_own_backend(settings: Settings) -> DenseBackend:
    """The backbone's own backend. One on the CPU leaves F16 sums to the workers, if any were asked for."""
    options = _options(settings)
    if settings.backend in (AUTO, *ON_CPU) and parse_workers(settings.workers or "0", settings.backend):
        options = replace(options, accumulation="f32")
    return _open_backend(settings.backend, options)


def _open_backend(name: str, options: Options) -> DenseBackend:
    try:
        return make_backend(name, options)
    except BackendUnavailable as error:
        raise UsageError(str(error)) from None


@contextmanager
def open_session(
    settings: Settings, door: Door | None = None, *, backend: DenseBackend | None = None
) -> Iterator[Session]:
    """Load the model that the settings name and start its workers; end them with the block.

    Through a door workers come in from elsewhere, too. `backend` is the backbone's own, in place of the settings'.
    """
    path = resolve_model(settings.model, os.environ)
    backend = backend or open_own_backend(settings)
    workers = parse_workers(settings.workers or (DEMO_WORKERS if path == DEMO else "0"), backend.name)
    as_asked = backend.numeric_class.accumulation == settings.accumulation
    for name in set(workers) - ({backend.name} if as_asked else set()):
        # Said here, once, rather than by a worker that cannot start. Keys and values are no matter of workers.
        _open_backend(name, replace(_options(settings), kv_cache="f32"))
    model = load_model(path, open_library(settings), backend)
    for warning in model.warnings:
        log.warning("%s", warning)
    with ExitStack() as stack:
        digest = WeightsDigest(model.gguf.paths)
        stack.callback(digest.stop)
        experts: ExpertSource = model.local_experts
        swarm: Swarm | None = None
        if not model.expert_tensors:
            if workers:
                log.warning("%s is a dense model: workers have nothing to do, so none is started", path.name)
        elif workers or door is not None:
            swarm = stack.enter_context(_swarm(model, workers, settings, door))
            experts = swarm
        elif path != DEMO and settings["workers"].source == "default":
            log.warning("all experts run in this process; share them out with --workers 2")
        yield Session(settings, model, Engine(model, experts, context=_context(settings, model)), swarm, digest)


def worker_threads(asked: int, workers: int) -> int:
    """Compute threads of each of so many local workers: they share out what was asked for, or all cores (0)."""
    return max(1, (asked or usable_cores()) // workers)


def _swarm(model: Model, workers: list[str], settings: Settings, door: Door | None) -> Swarm:
    progress = ProgressLine(sys.stderr)
    specs = [
        WorkerSpec(
            backend=name,
            memory_bytes=settings.worker_memory,
            threads=worker_threads(settings.threads, len(workers)),
            activations=settings.activations,
            accumulation=settings.accumulation,
        )
        for name in workers
    ]
    try:
        return Swarm(
            model,
            specs,
            local=model.local_experts,
            dense_class=dense_class(model, settings, settings.wire),
            wire=Wire(settings.wire),
            door=door,
            checks=Checks(every=settings.audit),
            on_progress=progress.show,
        )
    finally:
        progress.clear()


def _context(settings: Settings, model: Model) -> int:
    trained = model.trained_context or DEFAULT_CONTEXT
    if settings.context > trained:
        log.warning("the context of %d is longer than the %d that the model was made for", settings.context, trained)
    return int(settings.context) or min(trained, DEFAULT_CONTEXT)
