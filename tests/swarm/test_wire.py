"""Rows that cross the wire in F16: half the bytes, and the same bits whoever computes what."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm_kit import NoLocal, TinyExperts, ask, by_index, faulty, some_rows, swarm_of

from backbone.errors import BackboneError
from backbone.gate import Sent
from backbone.local_workers import WorkerSpec
from backbone.swarm import Swarm
from backbone.tolerance.sides import HalfWire
from backbone.trust import Checks
from backbone.wire import Wire
from kernels.interface import F32

F16 = Wire("f16")
ALWAYS = Checks(every=1)


@pytest.fixture
def model(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf")


def asked(rows: int = 5, scale: float = 1.0, seed: int = 3) -> tuple[F32, Any]:
    """Rows, and ids of experts; of the rows one has a value beyond F16's range, and from one too large rows come."""
    x = np.random.default_rng(seed).standard_normal((rows, 32)).astype(np.float32) * np.float32(scale)
    ids = np.array([np.random.default_rng(seed + i).permutation(4)[:2] for i in range(rows)], np.int32)
    if rows > 2:
        x[1] *= 1000  # its products do not fit
        x[2, 5] = 1e5
    return x, ids


def expected(model: TinyExperts, layer: int, x: F32, ids: Any) -> F32:
    """Another implementation's: experts in one process, rounded on the way to them and back."""
    return HalfWire(model.local()).wait(HalfWire(model.local()).send(layer, x, ids))


def test_the_cases_are_what_they_are_meant_to_be(model: TinyExperts) -> None:
    x, ids = asked()
    rows = expected(model, 0, x, ids)
    plain = model.local().send(0, x, ids)
    assert np.abs(rows[1]).max() > 65504
    assert np.abs(x[2]).max() > 65504
    assert (rows[[0, 3, 4]] != plain[[0, 3, 4]]).mean() > 0.9
    assert (rows[[0, 3, 4]] == rows[[0, 3, 4]].astype(np.float16)).all()
    assert (np.abs(rows[1]) % 32 > 0).any()  # whole, as it came: F16 has steps of 32 there


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_give_the_bits_of_one_process(model: TinyExperts, workers: int) -> None:
    with swarm_of(model, workers, wire=F16, local=NoLocal()) as swarm:
        for layer in range(model.layers):
            for rows in (1, 5, 20):
                x, ids = asked(rows)
                assert ask(swarm, layer, x, ids).tobytes() == expected(model, layer, x, ids).tobytes()
        assert swarm.class_changes == []


def test_what_the_backbone_computes_itself_has_them_too(model: TinyExperts) -> None:
    x, ids = asked(20)
    placement: Any = lambda sizes, candidates, **_: by_index({(0, 1): 0} if candidates else {})(sizes, candidates)  # noqa: E731
    with swarm_of(model, 1, wire=F16, placement=placement) as swarm:
        assert ask(swarm, 0, x, ids).tobytes() == expected(model, 0, x, ids).tobytes()
        assert swarm.report()[0].rows == (ids == 1).sum() > 0
        assert swarm.local_calls > 0
        os.kill(swarm.pids()[0], signal.SIGKILL)
        for layer in range(model.layers):
            assert ask(swarm, layer, x, ids).tobytes() == expected(model, layer, x, ids).tobytes()


def test_a_row_has_half_the_bytes(model: TinyExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict[str, list[list[int]]]()
    for kind in ("f32", "f16"):
        with swarm_of(model, 1, wire=Wire(kind)) as swarm:
            gate, told = swarm._gate, sizes.setdefault(kind, [])
            send, receive = gate.send, gate.receive

            def sent(route: bytes, frames: Any, *, copy: bool = True, send: Any = send, told: Any = told) -> Sent:
                told.append([memoryview(frame).nbytes for frame in frames[1:]])
                done: Sent = send(route, frames, copy=copy)
                return done

            def received(receive: Any = receive, told: Any = told) -> Any:
                found = receive()
                if found is not None:
                    told.append([memoryview(frame).nbytes for frame in found[2][1:]])
                return found

            monkeypatch.setattr(gate, "send", sent)
            monkeypatch.setattr(gate, "receive", received)
            x, ids = some_rows(model, rows=6, chosen=1)
            ask(swarm, 0, x, ids)
    assert [each for each in sizes["f32"] if each] == [[6 * 32 * 4, 6 * 8], [6 * 32 * 4]]
    assert [each for each in sizes["f16"] if each] == [[6 * 32 * 2, 6 * 8], [6 * 32 * 2]]


@pytest.mark.parametrize("workers", [1, 2])
def test_audits_find_the_honest_right(model: TinyExperts, workers: int) -> None:
    with swarm_of(model, workers, wire=F16, share_path=True, checks=ALWAYS) as swarm:
        for seed in range(10):
            x, ids = asked(seed=seed)
            assert ask(swarm, 1, x, ids).tobytes() == expected(model, 1, x, ids).tobytes()
        while swarm._trust.has_work:
            swarm._pump(0)
        reports = swarm.report()
        assert sum(report.audits for report in reports) >= 10
        assert [(report.audits_failed, report.rank) for report in reports] == [(0, "exact")] * workers


@pytest.mark.parametrize("lie", ["flip:1.2", "swap:1.2.0", "stale", "other"])
def test_audits_find_liars(model: TinyExperts, lie: str) -> None:
    with swarm_of(model, 1, wire=F16, share_path=True, command=faulty(lie), checks=ALWAYS) as swarm:
        (liar,) = swarm._roster
        seed = 0
        while not liar.is_off and liar.report.calls < 40:
            seed += 1
            x, ids = some_rows(model, chosen=4, seed=seed)
            ask(swarm, 1, x, ids)
        assert liar.is_off
        assert liar.report.failures[-1].startswith("audit: its rows of layer 1, expert ")


def test_audits_of_a_class_that_only_its_promise_judges(model: TinyExperts) -> None:
    """Numpy's rows, where the backbone knows none of its class: rounding is not held against them."""
    model.__class__ = _NativeOnly
    with Swarm(
        model, [WorkerSpec(backend="numpy")], local=model.local(), wire=F16, checks=ALWAYS, hedge_s=1e9
    ) as swarm:
        for seed in range(10):
            x, ids = asked(seed=seed)
            ask(swarm, 1, x, ids)
        while swarm._trust.has_work:
            swarm._pump(0)
        (report,) = swarm.report()
        assert report.audits >= 10
        assert (report.audits_failed, report.rank) == (0, "f32")


class _NativeOnly(TinyExperts):
    @property
    def judges(self) -> Any:
        return ()


def test_who_cannot_send_so_is_refused(model: TinyExperts) -> None:
    with (
        pytest.raises(BackboneError, match="it sends rows as f32; the backbone takes f16"),
        swarm_of(model, 1, wire=F16, command=faulty("dtype:f32")),
    ):
        raise AssertionError("the swarm started")


def test_the_class_map_says_so(model: TinyExperts) -> None:
    x, ids = asked()
    digests = set[str]()
    for workers in (1, 2):
        with swarm_of(model, workers, wire=F16, dense_class="own wire-f16") as swarm:
            ask(swarm, 0, x, ids)
            digests.add(swarm.class_map.digest)
    with swarm_of(model, 1, dense_class="own") as swarm:
        digests.add(swarm.class_map.digest)
    assert len(digests) == 2
