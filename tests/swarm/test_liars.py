"""Workers that are believed until they lie: each is named and demoted within 160 of its calls, and nobody beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm_kit import NEVER_S, PARTS, NoLocal, TinyExperts, ask, faulty, some_rows, swarm_of

from archdefs import load_library
from backbone import auditor, results
from backbone.apart import Apart, Question
from backbone.audit import Sampler
from backbone.auditor import Finding
from backbone.discovery import DEMO
from backbone.engine import Engine
from backbone.local_workers import WorkerSpec
from backbone.model import load_model
from backbone.oracle import Oracle
from backbone.ranks import Rank
from backbone.roster import Peer
from backbone.swarm import Swarm
from backbone.trust import MOST_WAITING, Checks
from kernels.interface import Options
from kernels.registry import make_backend
from protocol import PROTOCOL_VERSION
from protocol.capabilities import ClassInfo
from protocol.messages import Hello
from protocol.schema import one_line

sys.path.append(str(Path(__file__).parents[1] / "support"))
from faulty_worker import flipped

MOST_CALLS = 160
OFTEN = Checks(every=8)  #: so that chance fails a test once in a million times; test_audit.py has the default's
LAYER, EXPERT = 1, 2
LIES = [f"flip:{LAYER}.{EXPERT}", f"swap:{LAYER}.{EXPERT}.0", "f16", "stale", "other"]


@pytest.fixture
def model(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf")


def expected(model: TinyExperts, layer: int, x: Any, ids: Any) -> bytes:
    return model.local().send(layer, x, ids).tobytes()


def is_right(swarm: Swarm, model: TinyExperts, seed: int, layer: int = LAYER) -> bool:
    """Ask for all experts of a layer; whether the rows have the bits that they should have."""
    x, ids = some_rows(model, chosen=4, seed=seed)
    return ask(swarm, layer, x, ids).tobytes() == expected(model, layer, x, ids)


def liar_of(swarm: Swarm, mark: Path) -> Peer:
    """The worker whose process has the faults."""
    pid = int(mark.read_text(encoding="utf-8"))
    return next(peer for peer in swarm._roster if peer.worker is not None and peer.worker.pid == pid)


def ask_until_demoted(swarm: Swarm, model: TinyExperts, liar: Peer) -> None:
    seed = 0
    while not liar.is_off and liar.report.calls <= MOST_CALLS:
        seed += 1
        is_right(swarm, model, seed)


def look(swarm: Swarm) -> None:
    """Come to every verdict that is due."""
    while swarm._trust.has_work:
        swarm._pump(0)


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_beside_an_honest_worker(model: TinyExperts, tmp_path: Path, lie: str) -> None:
    mark = tmp_path / "liar"
    command = faulty(lie, f"first:{mark}")
    with swarm_of(model, 2, share_path=True, local=NoLocal(), command=command, checks=OFTEN) as swarm:
        liar = liar_of(swarm, mark)
        (honest,) = [report for report in swarm.report() if report is not liar.report]
        assert liar.report.rank == honest.rank == Rank.EXACT  # it was probed, and did not lie then
        ask_until_demoted(swarm, model, liar)
        report = liar.report
        assert liar.is_off
        assert report.calls <= MOST_CALLS
        assert report.audits_failed >= 1 or "in a call that checked another worker" in report.failures[-1]
        assert report.failures[-1].startswith(f"audit: its rows of layer {LAYER}, expert ")
        assert report.numeric_class == f"{liar.declared} measured {report.rank} of {report.name}"
        if lie.startswith(("flip", "swap")):
            assert f"expert {EXPERT} " in report.failures[-1] or lie.startswith("swap")
        assert report.error > 1e-5
        assert report.calls - report.audits + report.audits_failed <= report.in_doubt <= report.calls
        # What is answered after that is right, by the honest one alone.
        calls = report.calls
        look(swarm)
        for seed in range(1000, 1010):
            assert all(is_right(swarm, model, seed, layer) for layer in range(model.layers))
        assert report.calls == calls
        assert (honest.state, honest.failures, honest.audits_failed) == ("serving", [], 0)
        assert honest.numeric_class == liar.declared


def test_a_single_bit_moves_a_row_by_more_than_the_least_that_has_to_be_found(model: TinyExperts) -> None:
    """So that the test above is about what it says."""
    x, _ = some_rows(model, rows=16)
    weights = model.weights(LAYER, EXPERT)
    lie = flipped(weights)
    bits = [np.bitwise_count(getattr(weights, p).data ^ getattr(lie, p).data).sum() for p in PARTS]
    assert sum(bits) == 1
    backend = model.local()._backend
    pairs = np.array([(row, 0) for row in range(len(x))], np.int32)
    right, wrong = (backend.load({0: each}).rows(x, pairs) for each in (weights, lie))
    moved = np.linalg.norm(wrong - right, axis=1) / np.linalg.norm(right, axis=1)
    assert 1e-4 < moved.max() < 2e-3


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_whom_nobody_but_the_backbone_can_check(model: TinyExperts, lie: str) -> None:
    with swarm_of(model, 1, share_path=True, command=faulty(lie), checks=OFTEN) as swarm:
        (liar,) = swarm._roster
        ask_until_demoted(swarm, model, liar)
        assert liar.is_off
        assert liar.report.audits_failed == swarm.doubts == 1
        assert liar.report.calls <= MOST_CALLS
        calls = liar.report.calls
        assert all(is_right(swarm, model, 1000, layer) for layer in range(model.layers))
        assert liar.report.calls == calls
        assert swarm.class_changes == []  # the backbone is of the class, too


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_liar_of_a_class_that_the_backbone_cannot_compute_in(
    model: TinyExperts, tmp_path: Path, lie: str, workers: int
) -> None:
    """What its class promises decides; a new class map begins where nobody of the class is left."""
    mark = tmp_path / "liar"
    command = faulty(lie, f"first:{mark}", "all-class")
    with swarm_of(model, workers, share_path=True, command=command, checks=OFTEN) as swarm:
        liar = liar_of(swarm, mark)
        assert swarm.class_map.of(LAYER, EXPERT) == liar.declared == "another/f32/f32"
        assert liar.report.rank == Rank.F32  # nobody knows what bits it should have
        ask_until_demoted(swarm, model, liar)
        assert liar.is_off
        assert liar.report.calls <= MOST_CALLS
        calls = liar.report.calls
        look(swarm)
        assert all(is_right(swarm, model, 1000 + seed, seed % model.layers) for seed in range(9))
        assert liar.report.calls == calls
        assert [r.failures for r in swarm.report() if r is not liar.report] == [[]] * (workers - 1)
        assert len(swarm.class_changes) == (workers == 1)


@pytest.mark.parametrize("has_class", [True, False])
def test_two_that_lie_alike(model: TinyExperts, has_class: bool) -> None:
    """Each says of the other that it is right; by bits or by what the class promises the backbone sees both."""
    command = faulty("negate", *(() if has_class else ("all-class",)))
    with swarm_of(model, 2, share_path=True, command=command, checks=Checks(every=2)) as swarm:
        liars = list(swarm._roster)
        for seed in range(1, MOST_CALLS):
            if all(liar.is_off for liar in liars):
                break
            assert [report.failures for report in swarm.report()] == [[], []]  # both are found at once
            is_right(swarm, model, seed)
        assert sum(report.calls for report in swarm.report()) <= MOST_CALLS
        assert swarm.doubts == 2
        for report in swarm.report():
            assert report.state == "unfit"
            assert report.in_doubt == report.calls > 0  # that the other found some right says nothing
            assert report.failures[-1].endswith(
                f"; all {report.calls} calls that it has done are in doubt; no audit of it was right"
            )
        look(swarm)
        assert all(is_right(swarm, model, 1000 + seed, seed % model.layers) for seed in range(9))


@pytest.mark.parametrize("lie", ["spoil", "exchange"])
def test_who_spoils_a_few_rows_of_large_answers_is_found_by_another(
    model: TinyExperts, tmp_path: Path, lie: str
) -> None:
    """The first audit of it finds that: every row is computed again."""
    mark = tmp_path / "liar"
    command = faulty(lie, f"first:{mark}")
    with swarm_of(model, 2, share_path=True, local=NoLocal(), command=command, checks=Checks(every=4)) as swarm:
        liar = liar_of(swarm, mark)
        x, ids = some_rows(model, rows=300, chosen=4)
        while not liar.is_off and liar.report.calls <= MOST_CALLS:
            ask(swarm, LAYER, x, ids)
            look(swarm)
        assert liar.is_off
        assert (liar.report.audits, liar.report.audits_failed) in ((1, 1), (0, 0))  # 0: it checked the other one
        assert ask(swarm, LAYER, x, ids).tobytes() == expected(model, LAYER, x, ids)
        assert [r.failures for r in swarm.report() if r is not liar.report] == [[]]


@pytest.mark.parametrize(
    ("workers", "again", "judged"),
    [(2, 80, False), (2, 80, True), (2, 20, False), (2, 20, True), (2, 0, False), (1, 16, False)],
)
def test_how_much_of_a_large_answer_is_computed_again(
    model: TinyExperts, monkeypatch: pytest.MonkeyPatch, workers: int, again: int, judged: bool
) -> None:
    """All of it by another, or as much as fits; 16 rows by the backbone: alone, or to see whether the two agree rightly.

    0: the other cannot be asked after all.
    """
    if again == 20:
        monkeypatch.setattr(auditor, "room", lambda *_: 20)
    asked, own = list[int](), list[int]()
    plain_ask, plain_rows = Apart.ask, Oracle.rows

    def ask_apart(self: Apart, worker: str, layer: int, width: int, question: Question) -> bool:
        if not again:
            return False
        asked.append(len(question.pairs))
        return plain_ask(self, worker, layer, width, question)

    def rows_of(self: Oracle, kind: str, layer: int, expert: int, x: Any) -> Any:
        own.append(len(x))
        return plain_rows(self, kind, layer, expert, x)

    with swarm_of(model, workers, share_path=True, checks=Checks(every=1)) as swarm:
        monkeypatch.setattr(Apart, "ask", ask_apart)
        monkeypatch.setattr(Oracle, "rows", rows_of)
        monkeypatch.setattr(Sampler, "is_judged", lambda _: judged)
        x, ids = some_rows(model, rows=80 * workers, chosen=1)
        ids[:] = np.arange(len(ids))[:, None] % model.experts
        ask(swarm, LAYER, x, ids)
        while any(r.calls != r.audits for r in swarm.report()):
            swarm._pump(100)
        assert asked == ([again] * 2 if workers == 2 and again else [])
        assert sum(own) == (16 * workers if judged or not asked else 0)
        for peer in swarm._roster:
            assert (peer.report.calls, peer.report.rows, peer.vouched.last(set())) == (1, 80, 1)
            assert peer.vouched.sure(set()) == (again == 80)


def test_one_right_answer_says_nothing_of_those_before_it(model: TinyExperts) -> None:
    """In doubt is all that a liar has done, but for the very calls that were found right."""
    command = faulty(f"swap:{LAYER}.{EXPERT}.0", "after:60")
    # Of one seed, so that there are some of either kind before the first lie.
    with swarm_of(model, 1, share_path=True, command=command, checks=Checks(every=4, seed=1)) as swarm:
        (liar,) = swarm._roster
        last = right = 0
        for seed in range(1, 60 + MOST_CALLS):
            audits = liar.report.audits
            x, ids = some_rows(model, rows=4 + seed % 2, chosen=4, seed=seed)  # 16 rows or 20
            ask(swarm, LAYER, x, ids)
            look(swarm)
            if liar.is_off:
                break
            if liar.report.audits > audits:
                last, right = liar.report.calls, right + (ids.size == 16)
        report = liar.report
        assert report.audits_failed == 1
        assert 0 < right < report.audits - 1
        assert report.in_doubt == report.calls - right
        assert report.failures[-1].endswith(
            f"; all {report.calls} calls that it has done are in doubt but {right} that were audited whole and right; "
            f"the last right audit was {report.calls - last} calls ago"
        )


@pytest.mark.parametrize("judged", [False, True])
def test_what_a_liar_found_right_is_in_doubt_as_soon_as_it_is_caught(
    model: TinyExperts, monkeypatch: pytest.MonkeyPatch, judged: bool
) -> None:
    """But not where the backbone has looked as well."""
    monkeypatch.setattr(Sampler, "is_judged", lambda _: judged)
    with swarm_of(model, 2, share_path=True, local=NoLocal(), checks=Checks(every=1)) as swarm:
        first, second = swarm._roster
        for seed in range(4):
            x, ids = some_rows(model, rows=8, chosen=2, seed=seed)
            ask(swarm, LAYER, x, ids)
            while any(report.calls != report.audits for report in swarm.report()):
                swarm._pump(100)
        assert first.vouched.sure(set()) == first.report.calls > 0
        swarm._trust._on_guilty([(first, Finding(LAYER, EXPERT, 1e-4, 1))])
        assert first.report.in_doubt == 0  # all was audited whole
        swarm._trust._on_guilty([(second, Finding(LAYER, EXPERT, 1e-4, 1))])
        for report in swarm.report():
            assert report.in_doubt == (0 if judged else report.calls)


def test_by_default_and_with_the_draws_of_one_seed(model: TinyExperts) -> None:
    with swarm_of(model, 1, share_path=True, command=faulty(LIES[0]), checks=Checks(seed=1)) as swarm:
        (liar,) = swarm._roster
        ask_until_demoted(swarm, model, liar)
        assert liar.is_off
        assert MOST_CALLS / 32 < liar.report.calls <= MOST_CALLS


def test_a_liar_does_not_regain_trust_by_coming_back(model: TinyExperts, tmp_path: Path) -> None:
    mark = tmp_path / "liar"
    lie = faulty("swap:1.2.0", f"first:{mark}")
    with swarm_of(model, 2, share_path=True, command=lie, checks=OFTEN) as swarm:
        liar = liar_of(swarm, mark)
        ask_until_demoted(swarm, model, liar)
        assert (liar.rank, liar.report.state) == (Rank.UNFIT, "unfit")
        session, calls = liar.session, liar.report.calls
        # It greets anew, as one does whose connection broke.
        kind = ClassInfo(one_line(model.numeric_class.name), "f32", "f32")
        hello = Hello(PROTOCOL_VERSION, liar.report.build, "numpy", "", kind, ("f32",), 0, ())
        swarm._act(swarm._joining.on_message(liar, liar.calls_route or b"", hello))
        assert liar.session == session + 1
        assert liar.report.state == "unfit"  # before it may be asked for anything
        for seed in range(40):
            assert is_right(swarm, model, seed)
        assert (liar.rank, liar.report.state, liar.report.calls) == (Rank.UNFIT, "unfit", calls)
        assert liar.report.numeric_class != liar.declared


# ---- the probe


def test_who_lies_from_the_start_is_found_by_the_probe(model: TinyExperts, tmp_path: Path, caplog: Any) -> None:
    mark = tmp_path / "liar"
    command = faulty("f16", f"first:{mark}", "after:0")
    with swarm_of(model, 2, share_path=True, local=NoLocal(), command=command, checks=Checks(every=0)) as swarm:
        liar = liar_of(swarm, mark)
        (honest,) = [report for report in swarm.report() if report is not liar.report]
        assert (liar.rank, honest.rank) == (Rank.F16, Rank.EXACT)
        assert swarm.doubts == 0  # nothing of it was used
        assert "probed, its rows are off by" in liar.report.failures[0]
        assert f"worker {liar.name} is demoted: probed" in caplog.text
        # It is used, but for the last layer, and never as a member of the class that it said.
        assert 0 < len(liar.assigned) == model.layers - 1
        kinds = swarm.class_map.experts
        assert set(kinds[model.layers - 1]) == {liar.declared}
        assert all(is_right(swarm, model, seed, model.layers - 1) for seed in range(4))


def test_who_is_unfit_from_the_start_is_asked_for_nothing(model: TinyExperts, tmp_path: Path) -> None:
    mark = tmp_path / "liar"
    command = faulty("nan", f"first:{mark}", "after:0")
    with swarm_of(model, 2, share_path=True, local=NoLocal(), command=command) as swarm:
        liar = liar_of(swarm, mark)
        assert (liar.rank, liar.report.state, liar.report.experts) == (Rank.UNFIT, "unfit", 0)
        assert all(is_right(swarm, model, seed, seed % model.layers) for seed in range(10))
        assert liar.report.calls == 0
        assert liar.report.failures


def test_a_worker_that_dies_in_its_probe_is_done_without(model: TinyExperts) -> None:
    with swarm_of(model, 1, command=faulty("die", "after:0")) as swarm:
        assert is_right(swarm, model, 1)
        assert [(r.state, r.calls, r.rank) for r in swarm.report()] == [("lost", 0, "")]


def test_a_worker_that_hangs_in_its_probe_is_done_without(model: TinyExperts) -> None:
    with swarm_of(model, 1, command=faulty("hang", "after:0"), deadline_s=0.3) as swarm:
        assert is_right(swarm, model, 1)
        assert swarm.report()[0].failures == ["no answer within 0.3 s"]


# ---- honest workers


@pytest.mark.parametrize(("backend", "own"), [("native", "f32"), ("native", "i16"), ("numpy", "f32")])
def test_honest_workers_of_two_classes_are_never_accused(backend: str, own: str) -> None:
    """Both are held to bits where the backbone's C code computes in either class; to what they promise beside numpy."""
    model = load_model(DEMO, load_library(), make_backend(backend, Options(threads=1, activations=own)))
    specs = [WorkerSpec(backend="native", threads=1, activations=a) for a in ("f32", "i16", "i16")]
    with Swarm(model, specs, local=model.local_experts, checks=Checks(every=2), hedge_s=NEVER_S) as swarm:
        engine = Engine(model, swarm, context=160)
        sequence = engine.new_sequence()
        engine.extend(sequence, [(7 * i) % 500 for i in range(30)])
        for token in range(100):
            engine.extend(sequence, [token])
            look(swarm)  # else audits wait for a moment without messages, of which a busy machine has few
        plain, *quick = swarm.report()
        for report in swarm.report():
            assert report.failures == []
            assert report.audits_failed == 0
            assert report.audits >= 40
            assert report.error > 0
        assert plain.rank == (Rank.EXACT if backend == "native" else Rank.F32)
        assert [each.rank for each in quick] == [Rank.I16] * 2
        assert swarm.class_changes == []
        last = max(model.expert_tensors)
        assert set(swarm.class_map.experts[last]) == {plain.numeric_class}  # the others come after it there
        assert {each.numeric_class for each in quick} <= set(swarm.class_map.experts[0])


def test_an_honest_i16_worker_is_not_accused_for_a_large_column(tmp_path: Path) -> None:
    """The backbone cannot compute in its class, and the others of a block of 32 have few bits beside a large one."""
    model = TinyExperts(tmp_path / "tiny.gguf")
    for layer in range(model.layers):
        for part in ("gate", "up"):  # the large column counts for little, as in models that have one
            model.data[model.expert_tensors[layer][part]][:, :, 5] /= 64
    checks = Checks(every=1)
    with swarm_of(model, 1, local=NoLocal(), command=faulty("i16"), checks=checks) as swarm:  # of these weights
        (report,) = swarm.report()
        most = 0.0
        for seed in range(20):
            x, ids = some_rows(model, rows=4, chosen=4, seed=seed)
            x[:, 5] = 20
            rows = ask(swarm, LAYER, x, ids)
            look(swarm)
            given = (rows[ids == expert] for expert in range(model.experts))
            most = max(most, *(Oracle(model).error(LAYER, e, x, mine) for e, mine in enumerate(given)))
        assert 4e-4 < most < 2e-3
        assert (report.calls, report.audits, report.audits_failed, report.failures) == (20, 20, 0, [])


def test_what_was_found_of_workers_is_told(model: TinyExperts) -> None:
    with swarm_of(model, 1, share_path=True, command=faulty("swap:1.2.0"), checks=OFTEN) as swarm:
        (liar,) = swarm._roster
        (told,) = [results._worker(report, results.Before()) for report in swarm.report()]
        assert (told["rank"], told["state"], told["audits"], told["audits_failed"]) == ("exact", "serving", 0, 0)
        assert 0 < told["error"] < 1e-5
        ask_until_demoted(swarm, model, liar)
        (told,) = [results._worker(report, results.Before()) for report in swarm.report()]
        assert (told["rank"], told["state"], told["audits_failed"]) == ("unfit", "unfit", 1)
        assert told["audits"] >= 1
        assert told["error"] > 0.1
        assert told["calls_in_doubt"] <= told["calls"]
        table, reason = results.worker_lines([told], 0, None)
        head, line = (row.split() for row in table.splitlines())
        assert line[head.index("rank")] == "unfit"
        assert reason.startswith("local-1: audit: its rows of layer 1, expert ")


def test_what_waits_for_a_quiet_moment_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, done = TinyExperts(tmp_path / "tiny.gguf"), list[int]()
    with swarm_of(model, 1) as swarm:
        monkeypatch.setattr(swarm._poller, "poll", lambda timeout: [(swarm._gate.socket, 1)])  # never a quiet one
        swarm._trust._todo.extend([lambda: done.append(1)] * (MOST_WAITING + 5))
        for _ in range(20):
            swarm._pump(0)
        assert len(done) == 5
        monkeypatch.undo()
        while swarm._pump(0) or swarm._trust.has_work:
            pass
        assert len(done) == MOST_WAITING + 5
