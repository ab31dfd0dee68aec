"""The store: slices kept once and checked, experts put together or refused; and rows computed of them."""

from __future__ import annotations

import hashlib
import select
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm_kit import TinyExperts
from wire import slice_of

from kernels.gguf import open_gguf
from kernels.reference import expert_rows
from kernels.registry import make_backend
from protocol.messages import Assign, Slice
from worker.arrivals import Checked
from worker.compute import Layer
from worker.errors import WorkerError
from worker.experts import ExpertStore, slice_bytes

MakeStore = Callable[..., ExpertStore]


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    """Makes stores, which are closed with the test."""
    made: list[ExpertStore] = []

    def make(**options: Any) -> ExpertStore:
        made.append(ExpertStore(make_backend("numpy"), **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def checked(store: ExpertStore) -> Checked:
    """The next word on a whole slice."""
    while True:
        assert select.select([store.wake], [], [], 30)[0]
        for result in store.results():
            if isinstance(result, Checked):
                return result


def stored(store: ExpertStore, data: bytes, chunk: int = 100) -> bytes:
    """Store bytes in chunks; their sha256."""
    sha256 = hashlib.sha256(data).digest()
    for offset in range(0, len(data), chunk):
        store.add_chunk(sha256, len(data), offset, np.frombuffer(data[offset : offset + chunk], np.uint8))
    found = checked(store)
    assert found.sha256 == sha256
    assert found.data is not None
    assert found.data.tobytes() == data
    return sha256


def assignment(store: ExpertStore | None, model: TinyExperts, layer: int, experts: tuple[int, ...]) -> Assign:
    """An Assign of some experts, whose slices are stored if there is a store to put them in."""
    slices = list[Slice]()
    for expert in experts:
        for part, name in model.expert_tensors[layer].items():
            sha256 = stored(store, bytes(model.slice_data(name, expert))) if store else b""
            slices.append(Slice(expert, part, name, 0, *model.slice_shape(name), sha256))
    return Assign(1, layer, model.activation(layer), tuple(slices))


@pytest.fixture
def model(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf", has_biases=True)


@pytest.mark.parametrize("from_file", [False, True])
def test_rows_are_those_of_the_model(make_store: MakeStore, model: TinyExperts, from_file: bool) -> None:
    store = make_store(file=open_gguf(model.path) if from_file else None)
    store.load(assignment(None if from_file else store, model, 1, (3, 0)))
    x = np.random.default_rng(0).standard_normal((3, model.width)).astype(np.float32)
    pairs = np.array([[2, 3], [0, 0], [1, 3], [2, 0]], np.int32)
    rows, spent_ns = store.layer(1).rows(x, pairs)
    for row, (t, expert) in zip(rows, pairs.tolist(), strict=True):
        alone = expert_rows(model.weights(1, expert), x[t : t + 1])[0]
        assert row.tobytes() == alone.tobytes()
        # An oracle of its own, in float64.
        w = {part: model.data[name][expert].astype(np.float64) for part, name in model.expert_tensors[1].items()}
        gate = w["gate"] @ x[t] + w["gate_bias"]
        inner = gate / (1 + np.exp(-gate)) * (w["up"] @ x[t] + w["up_bias"])
        np.testing.assert_allclose(row, w["down"] @ inner + w["down_bias"], rtol=1e-4, atol=1e-4)
    assert spent_ns > 0


def test_a_slice_in_common_is_kept_once_and_outlives_one_layer(make_store: MakeStore, model: TinyExperts) -> None:
    store = make_store()
    first = assignment(store, model, 0, (0,))
    before = store.nbytes
    store.load(first)
    store.load(replace(first, layer=2))
    assert store.nbytes == before == sum(slice_bytes(piece) for piece in first.slices)
    store.keep({piece.sha256 for piece in first.slices}, without=0)
    with pytest.raises(KeyError):
        store.layer(0)
    assert store.layer(2)
    store.keep(set(), without=2)
    assert store.nbytes == 0


def test_a_wrong_slice_is_forgotten_and_can_come_again(make_store: MakeStore) -> None:
    store = make_store()
    data = bytes(range(200))
    sha256 = hashlib.sha256(data).digest()
    for last, is_right in ((b"\0", False), (data[-1:], True)):
        store.add_chunk(sha256, 200, 0, np.frombuffer(data[:199], np.uint8))
        store.add_chunk(sha256, 200, 199, np.frombuffer(last, np.uint8))
        assert (checked(store).data is not None) is is_right


@pytest.mark.parametrize(("offset", "length"), [(100, 50), (0, 201), (50, 1)])
def test_a_chunk_out_of_place_is_refused(make_store: MakeStore, offset: int, length: int) -> None:
    with pytest.raises(WorkerError, match=rf"a chunk of {length} bytes at {offset}; 0 of 200 are here"):
        make_store().add_chunk(bytes(32), 200, offset, np.zeros(length, np.uint8))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"part": "router"}, "'router' of 4 x 4 is no part of an expert"),
        ({"rows": 0}, "'gate' of 0 x 4 is no part"),
        ({"type_id": 9}, "9 is not a valid GGMLType"),
        ({"type_id": 12}, "row length 4 is no multiple of Q4_K's block"),
    ],
)
def test_slices_that_cannot_be_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(WorkerError) as caught:
        slice_bytes(replace(slice_of("gate"), **change))
    assert str(caught.value).startswith("blk.0.gate, expert 0: ")
    assert told in str(caught.value)


def experts_of(make_store: MakeStore, **shapes: tuple[int, int]) -> tuple[ExpertStore, Assign]:
    store = make_store()
    slices = tuple(
        slice_of(part, stored(store, bytes(4 * rows * cols)), rows=rows, cols=cols)
        for part, (rows, cols) in shapes.items()
    )
    return store, Assign(1, 0, "silu", slices)


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({"gate": (4, 2), "up": (4, 2)}, "an expert without one of gate, up, down"),
        ({"gate": (4, 2), "up": (4, 3), "down": (2, 4)}, "do not fit together: 4 x 2, 4 x 3, 2 x 4"),
        ({"gate": (4, 2), "up": (4, 2), "down": (2, 5)}, "do not fit together"),
        ({"gate": (4, 2), "up": (4, 2), "down": (2, 4), "up_bias": (1, 2)}, "up_bias has 2 values, not 4"),
        ({"gate": (4, 2), "up": (4, 2), "down": (2, 4), "down_bias": (1, 4)}, "down_bias has 4 values, not 2"),
    ],
)
def test_slices_that_make_no_expert_are_refused(
    make_store: MakeStore, shapes: dict[str, tuple[int, int]], told: str
) -> None:
    store, assign = experts_of(make_store, **shapes)
    with pytest.raises(WorkerError, match="layer 0: ") as caught:
        store.load(assign)
    assert told in str(caught.value)


def test_one_hash_for_two_sizes_is_refused(make_store: MakeStore) -> None:
    store, assign = experts_of(make_store, gate=(4, 2), up=(4, 2), down=(2, 4))
    slices = tuple(replace(piece, cols=3) if piece.part == "gate" else piece for piece in assign.slices)
    with pytest.raises(WorkerError, match="32 bytes for a F32 matrix 4 x 3 of 48 bytes"):
        store.load(replace(assign, slices=slices))


def test_an_unknown_activation_is_refused(make_store: MakeStore) -> None:
    store, assign = experts_of(make_store, gate=(4, 2), up=(4, 2), down=(2, 4))
    with pytest.raises(WorkerError, match="activation 'tanh' is not known here; known are .*silu"):
        store.load(replace(assign, activation="tanh"))


def test_the_file_here_has_to_be_the_same(make_store: MakeStore, model: TinyExperts) -> None:
    store = make_store(file=open_gguf(model.path))
    assign = assignment(None, model, 1, (0,))
    for change, told in (
        ({"tensor": "blk.9.gate"}, "no tensor blk.9.gate of type 0"),
        ({"type_id": 1}, "no tensor blk.1.gate of type 1"),
        ({"expert": 99}, "has no expert 99 of"),
    ):
        pieces = tuple(replace(p, **change) if p.part == "gate" or "expert" in change else p for p in assign.slices)
        with pytest.raises(WorkerError) as caught:
            store.load(replace(assign, slices=pieces))
        assert told in str(caught.value)
        assert str(model.path) in str(caught.value)


@pytest.mark.parametrize(
    ("pairs", "width", "told"),
    [
        ([[3, 0]], 32, "a pair of row 3; 3 rows came"),
        ([[-1, 0]], 32, "a pair of row -1"),
        ([[0, 0], [1, 2]], 32, "expert 2 is not held here"),
        ([[0, 0]], 31, "rows of 31 values for experts that take 32"),
    ],
)
def test_pairs_that_cannot_be_are_refused(model: TinyExperts, pairs: Any, width: int, told: str) -> None:
    experts = {0: model.weights(0, 0)}
    with pytest.raises(WorkerError) as caught:
        Layer(make_backend("numpy"), experts).rows(np.zeros((3, width), np.float32), np.array(pairs, np.int32))
    assert told in str(caught.value)
