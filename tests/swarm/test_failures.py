"""Workers that die, hang, lie or come back: the same bits, the culprit named, nothing left behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm_kit import NoLocal, TinyExperts, ask, faulty, pids_of, some_rows, swarm_of

from backbone.errors import BackboneError
from backbone.swarm import Swarm


@pytest.fixture
def model(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf")


def expected(model: TinyExperts, layer: int, x: Any, ids: Any) -> bytes:
    return model.local().send(layer, x, ids).tobytes()


def check(swarm: Swarm, model: TinyExperts, layer: int = 0, seed: int = 1) -> None:
    x, ids = some_rows(model, chosen=4, seed=seed)
    assert ask(swarm, layer, x, ids).tobytes() == expected(model, layer, x, ids)


def test_a_worker_killed_between_two_calls(model: TinyExperts, caplog: pytest.LogCaptureFixture) -> None:
    with swarm_of(model, 2) as swarm:
        check(swarm, model)
        assert swarm.local_calls == 0
        os.kill(pids_of(swarm)[0], signal.SIGKILL)
        check(swarm, model)
        assert swarm.local_calls == 1
        # The other one is given what the dead one had: soon nothing is computed here any more.
        before = 0
        while swarm.local_calls != before or swarm.report()[1].state != "serving":
            before = swarm.local_calls
            for layer in range(model.layers):
                check(swarm, model, layer)
        dead, alive = swarm.report()
    assert (dead.state, alive.state) == ("lost", "serving")
    assert alive.experts == model.layers * model.experts
    # Which of its ends is noticed first, the process's or the connection's, is the system's choice.
    (reason,) = dead.failures
    assert reason in ("its process was ended by SIGKILL", "its connection is gone")
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == [f"worker local-1 is lost: {reason}; its calls go to others, or are computed here"]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_die_in_the_middle_of_a_call(model: TinyExperts, workers: int) -> None:
    with swarm_of(model, workers, command=faulty("die")) as swarm:
        check(swarm, model)
        check(swarm, model, layer=1)
        assert all(r.state == "lost" and r.calls == 0 for r in swarm.report())
        assert swarm.local_calls == workers + 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("nan", "rows that are not finite"),
        ("flip-epoch", "rows of epoch"),
        ("flip-seq", "which was never made"),
        ("shape", "asked for"),
        ("half", "rows in F16, which it was not asked for"),
        ("garbage", "a message that cannot be read: a header that is no MessagePack"),
    ],
)
def test_garbage_is_recomputed_and_its_sender_barred(model: TinyExperts, fault: str, told: str) -> None:
    with swarm_of(model, 1, command=faulty(fault)) as swarm:
        for layer in range(model.layers):
            check(swarm, model, layer)
        (report,) = swarm.report()
        assert (report.state, report.calls) == ("lost", 0)
        assert told in report.failures[0]
        assert len(report.failures) == 1
        assert swarm.local_calls == model.layers


def test_an_answer_that_comes_twice_counts_once(model: TinyExperts) -> None:
    with swarm_of(model, 1, local=NoLocal(), command=faulty("twice")) as swarm:
        for layer in range(model.layers):
            check(swarm, model, layer)
        assert swarm.dropped == model.layers - 1  # the last one's second comes later
        assert swarm.report()[0].calls == model.layers
        assert swarm.report()[0].failures == []


def test_a_worker_that_hangs_is_given_up_after_the_deadline(model: TinyExperts) -> None:
    with swarm_of(model, 1, deadline_s=0.3, command=faulty("hang")) as swarm:
        check(swarm, model)
        assert swarm.report()[0].failures == ["no answer within 0.3 s"]


def test_a_stopped_worker_is_given_up_and_its_late_answer_dropped(model: TinyExperts) -> None:
    with swarm_of(model, 2, deadline_s=0.3) as swarm:
        (pid, _) = pids_of(swarm)
        os.kill(pid, signal.SIGSTOP)
        check(swarm, model)
        assert swarm.report()[0].failures == ["no answer within 0.3 s"]
        os.kill(pid, signal.SIGCONT)
        while not swarm.dropped or swarm.report()[1].state != "serving":  # it may be given more meanwhile
            check(swarm, model, layer=1)


def test_a_worker_whose_connection_breaks_comes_back(model: TinyExperts) -> None:
    with swarm_of(model, 1, command=faulty("reconnect")) as swarm:
        check(swarm, model)
        report = swarm.report()[0]
        calls = report.calls
        seed = 0
        while not report.failures or report.state != "serving" or report.calls == calls:
            seed += 1
            check(swarm, model, layer=seed % model.layers, seed=seed)
        assert set(report.failures) <= {"its connection broke and came back", "its connection is gone"}


def test_a_corrupt_slice_is_fetched_again(model: TinyExperts) -> None:
    with swarm_of(model, 1, local=NoLocal(), command=faulty("corrupt:1")) as swarm:
        check(swarm, model)
        check(swarm, model, layer=1)


def test_a_worker_that_cannot_load_its_experts_is_done_without(
    model: TinyExperts, caplog: pytest.LogCaptureFixture
) -> None:
    with swarm_of(model, 1, command=faulty("corrupt:999")) as swarm:
        check(swarm, model)
        assert [report.state for report in swarm.report()] == ["lost"]
        assert swarm.local_calls > 0
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert re.search(r"worker local-1 is lost: it cannot load its experts: slice \w{12} arrived 2 times", told[0])


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (faulty("die-at-start"), "its process ended with exit code 3: no luck today"),
        (
            faulty("version"),
            r"the worker speaks protocol 3, the backbone 2: update expertswarm on the backbone's machine",
        ),
        (faulty("dtype:f64"), "it sends rows as f64; the backbone takes f32"),
        (
            [sys.executable, "-c", "import no_such_module"],
            "ended with exit code 1: ModuleNotFoundError: No module named",
        ),
        (["/nonexistent/python"], "worker local-1 could not be started: .*No such file"),
        (["sleep", "60"], "worker local-1 has not said hello within 1 s"),
    ],
)
def test_a_worker_that_cannot_start_is_one_clear_line(model: TinyExperts, command: list[str], told: str) -> None:
    options: dict[str, Any] = {"join_timeout_s": 1.0} if command[0] == "sleep" else {}
    with pytest.raises(BackboneError, match=told) as caught, swarm_of(model, 1, command=command, **options):
        raise AssertionError("the swarm started")
    assert "\n" not in str(caught.value)


# ---- stragglers


def pace_of(swarm: Swarm, model: TinyExperts) -> None:
    """Ask until the workers' paces are known."""
    for _ in range(8):
        check(swarm, model)


def replicas(model: TinyExperts, workers: int, **options: Any) -> Any:
    """A swarm in which everybody holds everything, and whose calls are hedged."""
    return swarm_of(model, workers, share_path=True, hedge_s=0.05, **options)


def test_a_worker_stopped_in_a_call_is_hedged_by_a_replica(model: TinyExperts) -> None:
    with replicas(model, 2, local=NoLocal()) as swarm:
        pace_of(swarm, model)
        stopped = pids_of(swarm)[0]
        os.kill(stopped, signal.SIGSTOP)
        seed = 0
        while not swarm.report()[0].tally.hedged_lost:
            seed += 1
            check(swarm, model, seed=seed)
        first, second = swarm.report()
        assert (first.state, first.failures, first.tally.retried) == ("serving", [], 0)
        assert first.tally.waited_s > 0
        # While it owes an answer the other one gets all.
        calls = first.calls, second.calls
        check(swarm, model, layer=1)
        assert (first.calls, second.calls) == (calls[0], calls[1] + 1)
        os.kill(stopped, signal.SIGCONT)
        while first.calls == calls[0]:
            check(swarm, model)
        assert swarm.dropped == 0
        assert swarm.local_causes() == {}


def test_a_worker_stopped_in_a_call_is_hedged_here_where_nobody_else_holds_it(model: TinyExperts) -> None:
    with replicas(model, 1) as swarm:
        pace_of(swarm, model)
        (report,) = swarm.report()
        os.kill(pids_of(swarm)[0], signal.SIGSTOP)
        check(swarm, model)
        assert (report.tally.hedged_lost, report.failures) == (1, [])
        check(swarm, model, layer=1)
        assert swarm.local_causes() == {"hedged": 1, "straggling": 1}
        assert swarm.class_changes == []
        calls = report.calls
        os.kill(pids_of(swarm)[0], signal.SIGCONT)
        while report.calls == calls:
            check(swarm, model)
        assert swarm.dropped == 0


def test_a_worker_that_stops_reading_is_stalled_and_goes_on(model: TinyExperts) -> None:
    """Its queue runs full of calls that nobody waits for any more."""
    with swarm_of(model, 1, deadline_s=1e6) as swarm:
        check(swarm, model)
        (report,) = swarm.report()
        (pid,) = pids_of(swarm)
        os.kill(pid, signal.SIGSTOP)
        x, ids = some_rows(model, rows=2000, chosen=4)
        for _ in range(2000):
            swarm.send(0, x, ids)
            if swarm.local_causes():
                break
            swarm.abandon()
        assert swarm.local_causes() == {"stalled": 1}
        swarm.abandon()
        check(swarm, model, layer=2)
        assert (report.state, report.failures) == ("serving", [])
        os.kill(pid, signal.SIGCONT)
        calls = report.calls
        while report.calls == calls:
            check(swarm, model, layer=1)


# ---- rows that nobody's fault are


@pytest.mark.parametrize("workers", [1, 2])
def test_when_the_input_is_at_fault_nobody_is_barred(model: TinyExperts, workers: int) -> None:
    with swarm_of(model, workers, share_path=True) as swarm:
        x, ids = some_rows(model, chosen=4)
        for _ in range(2):
            with np.errstate(all="ignore"):
                rows = ask(swarm, 1, np.full_like(x, 3e38), ids)
            assert not np.isfinite(rows).all()
        assert [(r.state, r.failures) for r in swarm.report()] == [("serving", [])] * workers
        calls = sum(report.calls for report in swarm.report())
        check(swarm, model)
        assert sum(report.calls for report in swarm.report()) > calls


def test_two_holders_that_lie_are_both_barred(model: TinyExperts) -> None:
    with swarm_of(model, 2, share_path=True, command=faulty("nan")) as swarm:
        check(swarm, model)
        assert [r.state for r in swarm.report()] == ["lost", "lost"]
        assert all("rows that are not finite" in r.failures[0] for r in swarm.report())
        assert set(swarm.local_causes()) == {"not finite"}
