"""Rows that cross the wire in F16: half the bytes, and the same bits whoever computes what."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm_kit import NoLocal, TinyExperts, ask, by_index, faulty, some_rows, swarm_of

from backbone import wire
from backbone.calls import APART, Call
from backbone.errors import BackboneError
from backbone.gate import Sent
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


def asked(rows: int = 5, seed: int = 3) -> tuple[F32, Any]:
    """Rows of very different sizes, and ids of experts."""
    x = np.random.default_rng(seed).standard_normal((rows, 32)).astype(np.float32)
    ids = np.array([np.random.default_rng(seed + i).permutation(4)[:2] for i in range(rows)], np.int32)
    if rows > 2:
        x[1] *= 1e6
        x[2] *= 1e-6
    return x, ids


def expected(model: TinyExperts, layer: int, x: F32, ids: Any) -> F32:
    """Another implementation's: experts in one process, rounded on the way to them and back."""
    return HalfWire(model.local()).wait(HalfWire(model.local()).send(layer, x, ids))


def test_the_cases_are_what_they_are_meant_to_be(model: TinyExperts) -> None:
    x, ids = asked()
    rows, plain = expected(model, 0, x, ids), model.local().send(0, x, ids)
    assert np.abs(rows[1]).max() > 65504  # beyond F16
    assert np.abs(rows[2]).max() < 2.0**-24
    assert (rows != plain).mean() > 0.9
    apart = np.linalg.norm(rows - plain.astype(np.float64), axis=-1) / np.linalg.norm(plain.astype(np.float64), axis=-1)
    assert 1e-4 < apart.min() < apart.max() < 2e-3


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
    monkeypatch.setattr("random.randrange", lambda most: 1)
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
    assert [each for each in sizes["f16"] if each] == [[6 * 33 * 2, 6 * 8], [6 * 33 * 2]]


def until_audited(swarm: Swarm) -> Iterator[tuple[F32, Any]]:
    """What to ask until ten answers were audited."""
    for seed in range(1000):
        yield asked(seed=seed)
        while swarm._trust.has_work:
            swarm._pump(0)
        if sum(report.audits for report in swarm.report()) >= 10:
            return
    raise AssertionError("there were no audits")


@pytest.mark.parametrize("workers", [1, 2])
def test_audits_find_the_honest_right(model: TinyExperts, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "EXACT", 2)  # what is compared may have come in either kind
    with swarm_of(model, workers, wire=F16, share_path=True, checks=ALWAYS) as swarm:
        for x, ids in until_audited(swarm):
            assert ask(swarm, 1, x, ids).tobytes() == expected(model, 1, x, ids).tobytes()
        reports = swarm.report()
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


def test_a_check_looks_like_any_call_and_some_calls_like_a_probe(
    model: TinyExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "EXACT", 4)  # so that chance leaves neither out
    kinds = Counter[tuple[bool, str]]()
    with swarm_of(model, 2, wire=F16, share_path=True, checks=ALWAYS) as swarm:
        put = swarm._put_together

        def put_together(call: Call) -> Any:
            found = put(call)
            kinds[call.ticket == APART, "f16" if memoryview(found[1][1]).format == "e" else "f32"] += 1
            return found

        monkeypatch.setattr(swarm, "_put_together", put_together)
        for seed in range(400):
            x, ids = some_rows(model, rows=2, seed=seed)
            assert ask(swarm, 1, x, ids).tobytes() == expected(model, 1, x, ids).tobytes()
    for is_apart in (False, True):
        assert 0 < kinds[is_apart, "f32"] < kinds[is_apart, "f16"]


SIZES = [1.0, 1e-2, 1e-5, 1e-8]


@pytest.mark.parametrize("size", SIZES)
def test_audits_of_a_class_that_only_its_promise_judges(model: TinyExperts, size: float) -> None:
    """Numpy's rows, where the backbone knows none of its class: rounding is not held against them, nor that of i16."""
    model.__class__ = _NoJudges
    for name, data in model.data.items():
        if "down" in name:
            data *= np.float32(size)
    for command, rank in ((None, "f32"), (faulty("i16", "after:0"), "i16")):
        options: dict[str, Any] = {"command": command, "checks": ALWAYS, "wire": F16, "share_path": False}
        with swarm_of(model, 1, **options) as swarm:
            for x, ids in until_audited(swarm):
                ask(swarm, 1, x, ids)
            (report,) = swarm.report()
            assert (report.audits_failed, report.rank) == (0, rank), report


def test_less_precision_is_found_behind_the_rounding(tmp_path: Path) -> None:
    """Rows 4e-4 off that are passed off as F32, of a class that the backbone cannot compute in."""
    model = _NoJudges(tmp_path / "wide.gguf", width=1024)  # a step of one large value is little of a row
    with swarm_of(model, 1, wire=F16, share_path=False, command=faulty("f16"), checks=ALWAYS) as swarm:
        (liar,) = swarm._roster
        while not liar.is_off and liar.report.calls < 40:
            x, ids = some_rows(model, chosen=4, rows=20, seed=liar.report.calls)
            ask(swarm, 1, x, ids)
        assert liar.is_off


def test_what_is_near_and_what_is_not() -> None:
    draw = np.random.default_rng(1)
    exact = draw.standard_normal((64, 2048)) * 10.0 ** draw.uniform(-30, 30, (64, 1))
    for off, is_near in ((1e-7, True), (1e-5, True), (4e-4, False), (1e-2, False)):
        noise = draw.standard_normal(exact.shape)
        noise *= off * np.linalg.norm(exact, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
        rows = F16.rounded((exact + noise).astype(np.float32))
        assert F16.is_within(rows, exact, 1e-5) is is_near, off
        for row, other in zip(rows, exact, strict=True):
            assert F16.is_within(row[None], other[None], 1e-5) is is_near, off
    rows = F16.rounded(exact.astype(np.float32))
    for bad in (np.inf, np.nan):
        spoilt = rows.copy()
        spoilt[3, 5] = bad
        assert not F16.is_within(spoilt, exact, 1.0)
        assert not F16.is_within(rows, spoilt.astype(np.float64), 1.0)


class _NoJudges(TinyExperts):
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
