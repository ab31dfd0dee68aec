"""Slices written and hashed beside the loop: right or wrong is told, and a disk that fails only costs the cache."""

from __future__ import annotations

import hashlib
import logging
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worker.arrivals import Arrivals, Checked, Result, Stored
from worker.cache import Part, SliceCache, listing
from worker.errors import WorkerError

DATA = bytes(range(250)) * 4
SHA = hashlib.sha256(DATA).digest()


def u8(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


@pytest.fixture
def cache(tmp_path: Path) -> SliceCache:
    return SliceCache(tmp_path / "slices", 1 << 20)


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
def arrivals(request: pytest.FixtureRequest, cache: SliceCache) -> Iterator[Arrivals]:
    made = Arrivals(cache if request.param else None)
    yield made
    made.close()


@pytest.fixture
def on_disk(cache: SliceCache) -> Iterator[Arrivals]:
    made = Arrivals(cache)
    yield made
    made.close()


def told(arrivals: Arrivals, count: int) -> list[Result]:
    """So many results."""
    found: list[Result] = []
    while len(found) < count:
        assert select.select([arrivals.wake], [], [], 30)[0]
        found += arrivals.results()
    assert len(found) == count
    return found


def test_a_slice_arrives(arrivals: Arrivals) -> None:
    for offset in range(0, 1000, 300):
        arrivals.add(SHA, 1000, offset, u8(DATA[offset : offset + 300]))
    assert arrivals.here(SHA) == 1000
    assert arrivals.nbytes == 1000
    *stored, (whole) = told(arrivals, 5)
    assert stored == [Stored(300)] * 3 + [Stored(100)]
    assert isinstance(whole, Checked)
    assert whole.data is not None
    assert (whole.sha256, whole.data.tobytes()) == (SHA, DATA)
    assert not whole.data.flags.writeable
    assert arrivals.nbytes == arrivals.here(SHA) == 0
    assert arrivals.results() == []


def test_a_wrong_one_is_told_and_leaves_nothing(arrivals: Arrivals, cache: SliceCache) -> None:
    arrivals.add(SHA, 1000, 0, u8(DATA[::-1]))
    assert told(arrivals, 2)[1] == Checked(SHA, None)
    assert listing(cache.folder) == []
    arrivals.add(SHA, 1000, 0, u8(DATA))
    whole = told(arrivals, 2)[1]
    assert isinstance(whole, Checked)
    assert whole.data is not None


def test_what_is_let_go_of_is_not_told(arrivals: Arrivals) -> None:
    arrivals.add(SHA, 1000, 0, u8(DATA))
    arrivals.keep(())
    arrivals.add(SHA, 1000, 0, u8(DATA[:500]))
    arrivals.tell(Checked(b"last", None))
    assert told(arrivals, 3) == [Stored(1000), Stored(500), Checked(b"last", None)]
    assert arrivals.here(SHA) == 500


def test_a_killed_workers_part_is_taken_up_and_hashed(on_disk: Arrivals, cache: SliceCache) -> None:
    part = cache.part(SHA, 1000, 0)
    assert part is not None
    part.write(memoryview(DATA[:600]))
    part.leave()
    on_disk.add(SHA, 1000, 600, u8(DATA[600:]))
    whole = told(on_disk, 2)[1]
    assert isinstance(whole, Checked)
    assert whole.data is not None
    assert whole.data.tobytes() == DATA


def test_a_part_that_was_damaged_meanwhile_is_found_wrong(on_disk: Arrivals, cache: SliceCache) -> None:
    part = cache.part(SHA, 1000, 0)
    assert part is not None
    part.write(memoryview(b"x" + DATA[1:600]))
    part.leave()
    on_disk.add(SHA, 1000, 600, u8(DATA[600:]))
    assert told(on_disk, 2)[1] == Checked(SHA, None)
    assert listing(cache.folder) == []


def test_a_part_that_is_gone_is_found_wrong(on_disk: Arrivals) -> None:
    on_disk.add(SHA, 1000, 600, u8(DATA[600:]))
    assert told(on_disk, 2)[1] == Checked(SHA, None)


def test_leaving_keeps_what_has_come(cache: SliceCache) -> None:
    arrivals = Arrivals(cache)
    arrivals.add(SHA, 1000, 0, u8(DATA[:700]))
    arrivals.close()
    assert cache.here(SHA, 1000) == 700


def test_a_full_disk_costs_the_cache_and_nothing_else(
    on_disk: Arrivals, cache: SliceCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Part, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Part, "write", full)
    on_disk.add(SHA, 1000, 0, u8(DATA))
    assert told(on_disk, 2)[1] == Checked(SHA, None)
    on_disk.add(SHA, 1000, 0, u8(DATA))
    whole = told(on_disk, 2)[1]
    assert isinstance(whole, Checked)
    assert whole.data is not None
    assert whole.data.tobytes() == DATA
    assert listing(cache.folder) == []
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "no slices are kept on disk from now on: [Errno 28] No space left on device"
    ]


def test_a_folder_that_cannot_be_made_costs_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arrivals = Arrivals(SliceCache(tmp_path / "file" / "slices", 1 << 20))
    arrivals.add(SHA, 1000, 0, u8(DATA))
    whole = told(arrivals, 2)[1]
    assert isinstance(whole, Checked)
    assert whole.data is not None
    arrivals.close()


def test_what_lies_here_is_checked(arrivals: Arrivals) -> None:
    arrivals.check(SHA, u8(DATA))
    arrivals.check(SHA, u8(DATA[1:]))
    right, wrong = told(arrivals, 2)
    assert isinstance(right, Checked)
    assert right.data is not None
    assert wrong == Checked(SHA, None)


@pytest.mark.parametrize(("offset", "length"), [(0, 1001), (500, 501)])
def test_chunks_out_of_place_are_refused(arrivals: Arrivals, offset: int, length: int) -> None:
    with pytest.raises(WorkerError, match="a chunk of"):
        arrivals.add(SHA, 1000, offset, u8(bytes(length)))
    arrivals.add(SHA, 1000, 0, u8(DATA[:500]))
    with pytest.raises(WorkerError, match="500 of 1000 are here"):
        arrivals.add(SHA, 1000, 400, u8(bytes(10)))


def test_its_thread_ends_with_it() -> None:
    before = threading.active_count()
    arrivals = Arrivals()
    assert threading.active_count() == before + 1
    arrivals.close()
    assert threading.active_count() == before
