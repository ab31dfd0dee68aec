"""Weights of a joined worker: once over the wire, then from its disk, whatever happens to it in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from join_kit import Door, Joiner
from swarm_kit import TinyExperts

from backbone.slice_digests import SliceDigests
from backbone.weights import SliceServer
from protocol.frames import DType, Tensor, encode
from protocol.messages import Assign, Failed, Hello, Ready, Rows, Run, Welcome
from worker.cache import cache_folder, listing
from worker.chunk_size import LEAST_BYTES

Start = Callable[..., Joiner]
EXPERTS = (0, 1)


@pytest.fixture
def model(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf", layers=1, experts=2, width=256, inner=1100)


@pytest.fixture
def door(tmp_path: Path, model: TinyExperts) -> Iterator[Door]:
    door = Door(tmp_path / "backbone", slices=SliceServer(model, share_path=False, digests=SliceDigests(model)))
    yield door
    door.close()


def size_of(model: TinyExperts) -> int:
    return len(EXPERTS) * sum(len(model.slice_data(name, 0)) for name in model.expert_tensors[0].values())


def greeted(door: Door) -> tuple[bytes, Hello]:
    """A worker that came and was given its experts."""
    key, hello = door.hear(Hello)
    assert door.slices is not None
    door.say(key, Welcome("w"), Assign(1, 0, "silu", door.slices.grant(key.hex(), 0, EXPERTS, by_path=False)))
    return key, hello


def shas(door: Door, key: bytes) -> set[bytes]:
    assert door.slices is not None
    return {piece.sha256 for piece in door.slices.grant(key.hex(), 0, EXPERTS, by_path=False)}


def test_weights_are_fetched_once(door: Door, start: Start, model: TinyExperts, tmp_path: Path) -> None:
    worker = start(tmp_path / "a", str(door.invite()))
    key, hello = greeted(door)
    assert hello.cached == ()
    assert door.hear(Ready) == (key, Ready(1, 0))
    assert door.fetched == size_of(model)
    door.pump(lambda: "serving 2 experts" in worker.told())
    worker.stop()
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path / "a" / "cache")})
    assert {entry.sha256 for entry in listing(folder)} == shas(door, key)
    start(tmp_path / "a")
    key, hello = greeted(door)
    assert set(hello.cached) == shas(door, key)
    assert door.hear(Ready) == (key, Ready(1, 0))
    assert door.fetched == size_of(model)
    # What it computes of them is right.
    x = np.random.default_rng(0).standard_normal((2, model.width)).astype(np.float32)
    pairs = np.array([[0, 1], [1, 0], [1, 1]], "<i4")
    tensors = [Tensor(DType.F32, x.shape, x), Tensor(DType.I32, pairs.shape, pairs)]
    rows = heard_rows(door, key, encode(Run(1, 1, 0), tensors))
    wanted = model.local().bank(0).rows(x, pairs)
    assert rows == wanted.tobytes()


def heard_rows(door: Door, key: bytes, frames: list[Any]) -> bytes:
    """The bytes of the answer to a call."""
    door.gate.send(door.routes[key], frames)
    came: list[bytes] = []
    plain = door.gate.receive

    def receive() -> Any:
        received = plain()
        if received is not None and len(received[2]) > 1:
            came.append(bytes(received[2][1]))
        return received

    door.gate.receive = receive  # type: ignore[method-assign]
    door.hear(Rows)
    return came[-1]


def test_a_killed_worker_goes_on_where_it_was_cut_off(
    door: Door, start: Start, model: TinyExperts, tmp_path: Path
) -> None:
    worker = start(tmp_path / "a", str(door.invite()))
    door.most_fetched = 7 * LEAST_BYTES  # one slice and the beginning of another
    greeted(door)
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path / "a" / "cache")})
    door.pump(lambda: sum(entry.nbytes for entry in listing(folder)) == door.fetched > 4 * LEAST_BYTES)
    assert sorted(entry.is_part for entry in listing(folder)) == [False, True]
    worker.process.kill()
    worker.process.wait()
    door.most_fetched = 1 << 60
    start(tmp_path / "a")
    key, hello = greeted(door)
    assert len(hello.cached) == 1
    assert door.hear(Ready) == (key, Ready(1, 0))
    assert door.fetched == size_of(model)  # no byte came twice
    assert {entry.sha256 for entry in listing(folder)} == shas(door, key)


def test_what_is_damaged_on_disk_is_fetched_again(door: Door, start: Start, model: TinyExperts, tmp_path: Path) -> None:
    worker = start(tmp_path / "a", str(door.invite()))
    greeted(door)
    door.hear(Ready)
    worker.stop()
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path / "a" / "cache")})
    entry = listing(folder)[0]
    path = folder / entry.name
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    start(tmp_path / "a")
    key, _ = greeted(door)
    assert door.hear(Ready) == (key, Ready(1, 0))
    assert door.fetched == size_of(model) + entry.nbytes
    data[1000] ^= 1
    assert path.read_bytes() == data


def test_a_copy_of_the_model_is_used_for_what_it_holds(
    door: Door, start: Start, model: TinyExperts, tmp_path: Path
) -> None:
    start(tmp_path / "a", str(door.invite()), "--model", str(model.path))
    key, _ = greeted(door)
    assert door.hear(Ready) == (key, Ready(1, 0))
    assert door.fetched == 0
    # The same tensors with one value changed: the slices that have it come over the wire, the others do not.
    raw = bytearray(model.path.read_bytes())
    changed = model.slice_data("blk.0.up", 1)
    raw[raw.index(bytes(changed)) + 5] ^= 1
    (other := tmp_path / "other.gguf").write_bytes(raw)
    start(tmp_path / "b", str(door.invite()), "--model", str(other))
    key, _ = greeted(door)
    assert door.hear(Ready) == (key, Ready(1, 0))
    assert door.fetched == len(changed)


def test_a_joined_worker_takes_nothing_without_a_hash(
    door: Door, start: Start, model: TinyExperts, tmp_path: Path
) -> None:
    start(tmp_path / "a", str(door.invite()), "--model", str(model.path))
    key, _ = door.hear(Hello)
    nameless = SliceServer(model, share_path=True, digests=SliceDigests(model)).grant("w", 0, EXPERTS, by_path=True)
    door.say(key, Welcome("w"), Assign(1, 0, "silu", nameless))
    assert door.hear(Failed)[1].reason == "layer 0: slices without a sha256, and no model file here"


def test_without_a_cache_slices_outlast_the_backbone_in_memory(
    door: Door, start: Start, model: TinyExperts, tmp_path: Path
) -> None:
    start(tmp_path / "a", str(door.invite()), "--cache", "0")
    greeted(door)
    door.hear(Ready)
    assert door.fetched == size_of(model)
    assert not (tmp_path / "a" / "cache" / "expertswarm" / "slices").exists()
    door.close()
    again = Door(
        tmp_path / "backbone",
        f"tcp://127.0.0.1:{door.port}",
        slices=SliceServer(model, share_path=False, digests=SliceDigests(model)),
    )
    try:
        key, hello = greeted(again)
        assert set(hello.cached) == shas(again, key)
        assert again.hear(Ready) == (key, Ready(1, 0))
        assert again.fetched == 0
    finally:
        again.close()


def test_a_connection_lost_on_the_way_costs_no_byte(
    door: Door, start: Start, model: TinyExperts, tmp_path: Path
) -> None:
    start(tmp_path / "a", str(door.invite()))
    door.most_fetched = 7 * LEAST_BYTES
    greeted(door)
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path / "a" / "cache")})
    door.pump(lambda: sum(entry.nbytes for entry in listing(folder)) == door.fetched > 4 * LEAST_BYTES)
    door.close()
    again = Door(
        tmp_path / "backbone",
        f"tcp://127.0.0.1:{door.port}",
        slices=SliceServer(model, share_path=False, digests=SliceDigests(model)),
    )
    try:
        key, _ = greeted(again)
        assert again.hear(Ready) == (key, Ready(1, 0))
        assert door.fetched + again.fetched == size_of(model)
    finally:
        again.close()


def test_a_cache_that_is_too_small_stops_nothing(door: Door, start: Start, model: TinyExperts, tmp_path: Path) -> None:
    bound = 3 << 20
    start(tmp_path / "a", str(door.invite()), "--cache", str(bound))
    key, _ = greeted(door)
    assert door.hear(Ready) == (key, Ready(1, 0))
    assert door.fetched == size_of(model) > bound
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path / "a" / "cache")})
    assert 0 < sum(entry.nbytes for entry in listing(folder)) <= bound
