"""No worker outlives its backbone, however that ends; Ctrl-C is the backbone's affair."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_kit import TinyExperts, is_alive

SCRIPT = """
import sys, signal
sys.path[:0] = {paths!r}
from pathlib import Path
from swarm_kit import TinyExperts, pids_of, some_rows, ask, faulty
from backbone.swarm import Swarm, WorkerSpec
model = TinyExperts(Path({path!r}))
try:
    with Swarm(model, [WorkerSpec(backend="numpy")] * 2, local=model.local(), command={command}) as swarm:
        x, ids = some_rows(model)
        ticket = swarm.send(0, x, ids)
        print(*pids_of(swarm), flush=True)
        {then}
except KeyboardInterrupt:
    print("interrupted", [r.state for r in swarm.report()], flush=True)
"""


@pytest.fixture
def backbone(tmp_path: Path, request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    """A process group with a swarm of two workers in the middle of a call."""
    command, then = request.param
    root = Path(__file__).parents[2]
    script = SCRIPT.format(
        paths=[str(root), str(root / "tests" / "support")], path=str(tmp_path / "m.gguf"), command=command, then=then
    )
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    return pids


def wait_for_the_end_of(pids: list[int]) -> None:
    """Returns when the processes are gone; they are not our children, so their pidfds say so."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([pidfd], [], [], 15)[0], f"worker {pid} is still there"
        finally:
            os.close(pidfd)


@pytest.mark.parametrize(
    "backbone",
    [("None", "signal.pause()"), ("faulty('delay:100')", "signal.pause()"), ("faulty('hang')", "swarm.wait(ticket)")],
    indirect=True,
    ids=["idle", "computing", "hanging"],
)
def test_no_worker_survives_a_killed_backbone(backbone: subprocess.Popen[str]) -> None:
    pids = workers_of(backbone)
    backbone.kill()
    backbone.communicate(timeout=15)
    wait_for_the_end_of(pids)


@pytest.mark.parametrize(
    "backbone", [("None", "signal.pause()"), ("faulty('delay:100')", "swarm.wait(ticket)")], indirect=True
)
def test_ctrl_c_ends_the_workers_in_order(backbone: subprocess.Popen[str]) -> None:
    pids = workers_of(backbone)
    os.killpg(backbone.pid, signal.SIGINT)  # as a terminal does
    out, err = backbone.communicate(timeout=15)
    assert out == "interrupted ['serving', 'serving']\n"
    assert err == ""
    assert backbone.returncode == 0
    wait_for_the_end_of(pids)


def test_keys_are_in_no_argument_and_no_environment(tmp_path: Path) -> None:
    from swarm_kit import pids_of, swarm_of

    model = TinyExperts(tmp_path / "tiny.gguf")
    with swarm_of(model, 1) as swarm:
        (pid,) = pids_of(swarm)
        seen = b"".join((Path("/proc") / str(pid) / name).read_bytes() for name in ("cmdline", "environ"))
        assert swarm._gate.public_key not in seen
        assert next(iter(swarm._roster)).worker.public_key not in seen
        assert swarm._gate.endpoint.encode() not in seen
        assert str(model.path).encode() not in seen
