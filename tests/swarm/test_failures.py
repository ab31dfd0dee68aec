"""Workers that die, hang, lie or come back: the same bits, the culprit named, nothing left behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

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
        for layer in range(model.layers):
            check(swarm, model, layer)
        assert swarm.local_calls == model.layers
        dead, alive = swarm.report()
    assert (dead.state, alive.state) == ("lost", "serving")
    # Which of its ends is noticed first, the process's or the connection's, is the system's choice.
    (reason,) = dead.failures
    assert reason in ("its process was ended by SIGKILL", "its connection is gone")
    assert alive.calls == 1 + model.layers
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
        ("shape", "asked for"),
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
        while not swarm.dropped:
            check(swarm, model, layer=1)
        assert swarm.report()[1].state == "serving"


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
            r"the worker speaks protocol 2, the backbone 1: update expertswarm on the backbone's machine",
        ),
        (faulty("dtype"), "it sends rows as f64; the backbone takes f32"),
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
