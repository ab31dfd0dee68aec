"""What the settings ask of the backbone's backend and of its workers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backbone import session
from backbone.local_workers import WorkerSpec
from backbone.session import open_backend, open_session, worker_threads
from backbone.settings import Settings, resolve
from kernels.interface import Options


def settings(**given: str) -> Settings:
    return resolve(argparse.Namespace(**given), {}, Path("absent"))


@pytest.mark.parametrize(
    ("asked", "cores", "workers", "threads"),
    [(0, 8, 2, 4), (0, 8, 3, 2), (0, 2, 4, 1), (6, 2, 2, 3), (1, 8, 2, 1), (7, 64, 1, 7)],
)
def test_workers_share_the_cores_out(
    asked: int, cores: int, workers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "usable_cores", lambda: cores)
    assert worker_threads(asked, workers) == threads


def test_the_backend_gets_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr(session, "make_backend", lambda *how: asked.append(how))
    open_backend("far", settings(threads="5", activations="i16", kv_cache="f16"))
    open_backend("far", settings())
    assert asked == [("far", Options(threads=5, activations="i16", kv_cache="f16")), ("far", Options())]


@pytest.mark.parametrize(("cache", "ending"), [("f32", "/f32"), ("f16", "/f32 kv-f16")])
def test_provenance_tells_how_keys_and_values_are_kept(cache: str, ending: str) -> None:
    with open_session(settings(workers="0", kv_cache=cache)) as opened:
        found = opened.provenance()
    assert found["backbone_class"] == f"canonical-1/f32{ending}"


class NoWorkersToday(Exception):
    """Stands for what would start them."""


def specs_of(monkeypatch: pytest.MonkeyPatch, **given: str) -> Sequence[WorkerSpec]:
    found = list[WorkerSpec]()

    def swarm(model: Any, specs: Sequence[WorkerSpec], **options: Any) -> None:
        found.extend(specs)
        raise NoWorkersToday

    monkeypatch.setattr(session, "Swarm", swarm)
    with pytest.raises(NoWorkersToday), open_session(settings(**given)):
        pass
    return found


def test_local_workers_are_told_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    one = WorkerSpec(backend="numpy", memory_bytes=800_000_000, threads=3, activations="f32")
    assert specs_of(monkeypatch, workers="numpy:3", worker_memory="800M", threads="9") == [one] * 3
    monkeypatch.setattr(session, "usable_cores", lambda: 8)
    assert [spec.threads for spec in specs_of(monkeypatch, workers="numpy:2")] == [4, 4]


def test_keys_and_values_are_no_matter_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = specs_of(monkeypatch, workers="numpy:1,native:1", kv_cache="f16")
    assert [spec.backend for spec in specs] == ["numpy", "native"]
