"""Digests: right, kept by device, inode, size and time, never believed when damaged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shared_data import ROOT

from backbone import provenance
from backbone.provenance import (
    DigestCache,
    WeightsDigest,
    cache_folder,
    class_map_digest,
    engine_sha256,
    known_sha256,
)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def plant(folder: Path, path: Path, value: object) -> None:
    """What the cache says of a file as it is now."""
    stat = path.stat()
    folder.mkdir(exist_ok=True)
    key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
    (folder / "digests.json").write_text(json.dumps({key: value}))


def test_a_file_is_hashed_and_its_digest_kept(weights: Path, kept: Path) -> None:
    assert known_sha256([weights], DigestCache(kept)) is None
    assert WeightsDigest([weights], kept).result() == sha(b"weights" * 1000)
    assert known_sha256([weights], DigestCache(kept)) == sha(b"weights" * 1000)
    assert kept.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in kept.iterdir()] == ["digests.json"]


def test_a_kept_digest_is_used_without_reading_the_file(weights: Path, kept: Path) -> None:
    plant(kept, weights, "e" * 64)
    assert WeightsDigest([weights], kept).result() == "e" * 64


def test_another_time_size_or_inode_is_another_file(weights: Path, kept: Path, tmp_path: Path) -> None:
    plant(kept, weights, "e" * 64)
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert WeightsDigest([weights], kept).result() == sha(b"weights" * 1000)

    plant(kept, weights, "e" * 64)
    before = weights.stat()
    weights.write_bytes(b"weights" * 999)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert WeightsDigest([weights], kept).result() == sha(b"weights" * 999)

    plant(kept, weights, "e" * 64)
    before = weights.stat()
    other = tmp_path / "other"
    other.write_bytes(b"WEIGHTS" * 999)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(weights)
    assert WeightsDigest([weights], kept).result() == sha(b"WEIGHTS" * 999)


@pytest.mark.parametrize("value", [None, 7, "", "e" * 63, "e" * 65, "x" * 64, "E" * 64, "e" * 64 + "\n", ["e" * 64]])
def test_what_is_no_digest_is_not_believed(value: object, weights: Path, kept: Path) -> None:
    plant(kept, weights, value)
    assert WeightsDigest([weights], kept).result() == sha(b"weights" * 1000)
    assert DigestCache(kept).get(weights) == sha(b"weights" * 1000)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null", b" " * (5 << 20)])
def test_a_damaged_cache_is_written_anew(content: bytes, weights: Path, kept: Path) -> None:
    kept.mkdir()
    (kept / "digests.json").write_bytes(content)
    assert WeightsDigest([weights], kept).result() == sha(b"weights" * 1000)
    assert DigestCache(kept).get(weights) == sha(b"weights" * 1000)


def test_a_cache_that_cannot_be_written_costs_only_time(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert WeightsDigest([weights], tmp_path / "file" / "cache").result() == sha(b"weights" * 1000)


def test_the_cache_does_not_grow_for_ever(weights: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MAX_ENTRIES", 3)
    cache = DigestCache(kept)
    for i in range(5):
        os.utime(weights, ns=(0, i))
        cache.put(weights.stat(), str(i) * 64)
    assert list(json.loads((kept / "digests.json").read_text()).values()) == ["2" * 64, "3" * 64, "4" * 64]


def test_a_model_in_parts_is_the_digest_of_its_parts_digests(kept: Path, tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, part in enumerate(parts):
        part.write_bytes(bytes([i]) * 100)
    expected = sha(f"{sha(bytes(100))}\n{sha(bytes([1]) * 100)}".encode())
    assert WeightsDigest(parts, kept).result() == expected
    assert known_sha256(parts, DigestCache(kept)) == expected
    os.utime(parts[1], ns=(0, 0))
    assert known_sha256(parts, DigestCache(kept)) is None
    assert WeightsDigest(parts[::-1], kept).result() != expected


def test_ollamas_own_name_is_the_digest_and_the_file_is_not_read(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    blob = tmp_path / "blobs" / f"sha256-{'c' * 64}"
    blob.parent.mkdir()
    blob.write_bytes(b"anything")
    assert WeightsDigest([blob], kept).result() == "c" * 64
    assert not kept.exists()


def test_a_file_that_cannot_be_read_has_no_digest(weights: Path, kept: Path, tmp_path: Path) -> None:
    # A thread that died of its exception would be a warning, and warnings fail.
    assert WeightsDigest([tmp_path / "absent"], kept).result() == ""
    assert WeightsDigest([tmp_path], kept).result() == ""
    assert WeightsDigest([weights, tmp_path / "absent"], kept).result() == ""
    assert known_sha256([], DigestCache(kept)) is None


def test_a_file_changed_while_it_is_hashed_is_not_kept(
    weights: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fstat, list[int]()

    def touching(descriptor: int) -> os.stat_result:
        if real(descriptor).st_ino == weights.stat().st_ino:
            calls.append(descriptor)
            os.utime(weights, ns=(0, len(calls)))
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", touching)
    assert WeightsDigest([weights], kept).result() == sha(b"weights" * 1000)
    assert len(calls) >= 2
    assert not kept.exists()


def test_stopping_ends_the_hashing_and_keeps_nothing(kept: Path, tmp_path: Path) -> None:
    endless = tmp_path / "pipe"
    os.mkfifo(endless)
    digest = WeightsDigest([endless], kept)  # waits for a writer
    with endless.open("wb") as writer:
        digest._stop.set()
        writer.write(b"x")
    digest.stop()
    assert digest.result() == ""
    assert not kept.exists()


def test_the_cache_folder(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/expertswarm")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/expertswarm")


def test_the_class_map_knows_each_expert() -> None:
    base = class_map_digest("f32 a", {0: ["x", "y"], 2: ["x", "x"]})
    assert base == sha(b"backbone f32 a\n0 0 x\n0 1 y\n2 0 x\n2 1 x")
    assert base == class_map_digest("f32 a", {2: ["x", "x"], 0: ["x", "y"]})
    assert len({base, class_map_digest("f32 a", {0: ["y", "x"], 2: ["x", "x"]}), class_map_digest("b", {})}) == 3


def engine_of(root: Path) -> str:
    code = "from backbone.provenance import engine_sha256; print(engine_sha256())"
    environ = {"PYTHONPATH": str(root), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ, cwd=root
    ).stdout.strip()


def test_the_engines_digest_is_of_its_sources_wherever_they_lie(tmp_path: Path) -> None:
    for package in provenance.PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__", "*.gguf")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    lines = [
        f"{path.relative_to(tmp_path).as_posix()} {sha(path.read_bytes())}\n"
        for path in tmp_path.rglob("*")
        if path.suffix in (".py", ".archdef", ".c", ".h", ".cl", ".cu")
    ]
    expected = sha("".join(sorted(lines, key=lambda line: line.split()[0])).encode())
    assert engine_sha256() == expected
    assert engine_of(tmp_path) == expected
    (tmp_path / "kernels" / "notes.txt").write_text("no source")
    assert engine_of(tmp_path) == expected
    definition = tmp_path / "archdefs" / "llama.archdef"
    definition.write_bytes(definition.read_bytes() + b"\n")
    assert engine_of(tmp_path) != expected
