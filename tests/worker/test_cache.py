"""Slices on disk: found again, taken up where they were cut off, shared by processes, never more than the bound."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worker.cache import DEFAULT_BYTES, Part, SliceCache, cache_folder, default_bytes, listing, prune
from worker.mapping import mapped

ROOT = Path(__file__).parents[2]


def data_of(number: int, size: int = 100) -> bytes:
    return bytes([number]) * size


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.fixture
def cache(tmp_path: Path) -> SliceCache:
    return SliceCache(tmp_path / "slices", 1 << 20)


def part_of(cache: SliceCache, data: bytes, done: int = 0) -> Part:
    part = cache.part(sha(data), len(data), done)
    assert part is not None
    return part


def put(cache: SliceCache, data: bytes) -> None:
    part = part_of(cache, data)
    part.write(memoryview(data))
    assert part.finish().tobytes() == data


def age(cache: SliceCache, data: bytes, used_s: float) -> None:
    os.utime(cache.folder / sha(data).hex(), (used_s, used_s))


def names(cache: SliceCache) -> set[bytes]:
    return {entry.sha256 for entry in listing(cache.folder)}


def test_a_slice_is_a_file_of_its_name_that_is_mapped(cache: SliceCache) -> None:
    data = data_of(1)
    assert cache.here(sha(data), 100) == 0
    assert cache.open(sha(data), 100) is None
    put(cache, data)
    assert [path.name for path in cache.folder.iterdir()] == [sha(data).hex()]
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert cache.here(sha(data), 100) == 100
    found = cache.open(sha(data), 100)
    assert found is not None
    assert found.tobytes() == data
    assert not found.flags.writeable
    assert cache.here(sha(data), 99) == 0  # of another size it is none
    assert cache.open(sha(data), 99) is None


def test_a_mapping_takes_no_descriptor_and_outlives_its_file(cache: SliceCache) -> None:
    data = data_of(1, 10_000)
    put(cache, data)
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = [cache.open(sha(data), 10_000) for _ in range(50)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    cache.remove(sha(data))
    assert not names(cache)
    assert all(array is not None and array.tobytes() == data for array in found)
    maps = Path("/proc/self/maps").read_text
    assert sha(data).hex() in maps()
    view = found[0][10:20] if found[0] is not None else None
    found.clear()
    assert view is not None
    assert view.tobytes() == data[:10]
    assert sha(data).hex() in maps()
    del view
    assert sha(data).hex() not in maps()


def test_an_empty_file_is_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert mapped(tmp_path / "empty").tobytes() == b""


def test_what_was_cut_off_is_taken_up(cache: SliceCache) -> None:
    data = data_of(1) + data_of(2)
    part = part_of(cache, data)
    part.write(memoryview(data[:150]))
    part.leave()
    again = SliceCache(cache.folder, 1 << 20)
    assert again.here(sha(data), 200) == 150
    assert again.open(sha(data), 200) is None
    assert list(again.newest()) == []
    assert again.part(sha(data), 200, 160) is None  # so much is not there
    part = part_of(again, data, 120)
    assert b"".join(part.blocks()) == data[:120]
    part.write(memoryview(data[120:]))
    assert part.finish().tobytes() == data
    assert list(again.newest()) == [sha(data)]


def test_a_wrong_part_is_removed(cache: SliceCache) -> None:
    part = part_of(cache, data_of(1))
    part.write(memoryview(data_of(2)))
    part.discard()
    assert list(cache.folder.iterdir()) == []


def test_two_writers_of_a_slice_do_not_meet(cache: SliceCache) -> None:
    data = data_of(1)
    # A lock belongs to an open file, so that two in one process are as good as two processes.
    one, other = part_of(cache, data), part_of(SliceCache(cache.folder, 1 << 20), data)
    assert len(listing(cache.folder)) == 2
    one.write(memoryview(data[:50]))
    other.write(memoryview(data))
    assert other.finish().tobytes() == data
    one.write(memoryview(data[50:]))
    assert one.finish().tobytes() == data
    assert [path.name for path in cache.folder.iterdir()] == [sha(data).hex()]


def test_a_full_cache_lets_go_of_what_was_not_used_for_longest(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path / "slices", 450)
    for number in (1, 2, 3, 4):
        put(cache, data_of(number))
        age(cache, data_of(number), number)
    again = SliceCache(cache.folder, 450)
    assert again.open(sha(data_of(1)), 100) is not None  # used by this process, and now the newest
    put(again, data_of(5))
    held = sum(entry.nbytes for entry in listing(again.folder))
    assert held <= 450
    assert sha(data_of(1)) in names(again)
    assert sha(data_of(5)) in names(again)
    assert sha(data_of(2)) not in names(again)
    # What is in use is never let go of; then there is no room.
    for number in (3, 4):
        again.open(sha(data_of(number)), 100)
    full = SliceCache(cache.folder, 100)
    for entry in listing(cache.folder):
        full.open(entry.sha256, 100)
    assert full.part(sha(data_of(9)), 100, 0) is None
    full.release([sha(data_of(1))])
    assert full.part(sha(data_of(9)), 100, 0) is None
    full.release(())
    part_of(full, data_of(9)).leave()
    assert SliceCache(tmp_path / "slices", 50).part(sha(data_of(9)), 100, 0) is None


def test_pruning_leaves_what_somebody_writes(cache: SliceCache) -> None:
    put(cache, data_of(1))
    writing, left = part_of(cache, data_of(2)), part_of(cache, data_of(3))
    for part in (writing, left):
        part.write(memoryview(b"abc"))
    left.leave()
    (cache.folder / "something.else").write_text("x")
    assert prune(cache.folder, 10_000) == []
    removed = prune(cache.folder, 0)
    assert {entry.sha256 for entry in removed} == {sha(data_of(1)), sha(data_of(3))}
    assert names(cache) == {sha(data_of(2))}
    assert (cache.folder / "something.else").exists()
    with (cache.folder / f"{sha(data_of(2)).hex()}.part").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    writing.leave()


def test_the_size_of_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100 << 30})
    monkeypatch.setattr("worker.cache.shutil.disk_usage", lambda path: usage)
    assert default_bytes(tmp_path / "not" / "there") == DEFAULT_BYTES
    usage.free = 1000
    put(cache := SliceCache(tmp_path / "slices", 1 << 20), data_of(1, 500))
    assert default_bytes(cache.folder) == 1200
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/expertswarm/slices")


# ---- the command


def run(home: Path, *args: str) -> Any:
    environ = {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "worker", "cache", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_lists_and_prunes(tmp_path: Path) -> None:
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert run(tmp_path, "list").stderr == f"0 slices, 0.0 MB in {folder}\n"
    cache = SliceCache(folder, 1 << 30)
    for number in (1, 2):
        put(cache, data_of(number, 2_000_000))
        age(cache, data_of(number, 2_000_000), 1000 + number)
    part = part_of(cache, data_of(3, 9))
    part.write(memoryview(b"abc"))
    part.leave()
    first, last = (sha(data_of(number, 2_000_000)).hex() for number in (1, 2))
    listed = run(tmp_path, "list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [sha(data_of(3, 9)).hex(), last, first]
    assert listed.stdout.splitlines()[0].endswith("(in part)")
    assert listed.stdout.splitlines()[1].split()[1:] == ["2.000", "MB"]
    assert listed.stderr == f"3 slices, 4.0 MB in {folder}\n"
    found = json.loads(run(tmp_path, "list", "--json").stdout)
    assert (found["folder"], found["bytes"]) == (str(folder), 4_000_003)
    assert found["slices"][2] == {"sha256": first, "bytes": 2_000_000, "whole": True, "used": 1001}
    assert run(tmp_path, "prune", "--to", "3M").stdout == "removed 1 slices, 2.0 MB; 2.0 MB are left\n"
    assert [entry.sha256.hex() for entry in listing(folder)][1:] == [last]
    pruned = json.loads(run(tmp_path, "prune", "--json").stdout)
    assert pruned == {"folder": str(folder), "removed": 2, "freed_bytes": 2_000_003, "bytes": 0}
    assert run(tmp_path, "prune", "--to", "x").returncode == 2


def test_arrays_are_what_numpy_takes(cache: SliceCache) -> None:
    put(cache, np.arange(25, dtype="<f4").tobytes())
    found = cache.open(next(cache.newest()), 100)
    assert found is not None
    assert found.view("<f4").tolist() == list(range(25))
