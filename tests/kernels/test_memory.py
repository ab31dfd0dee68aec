"""How much memory a process may use: the machine's and its cgroups' of either version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from shared_data import ROOT

from kernels.memory import free_memory, usable_memory

MEMINFO = "MemTotal:        8000000 kB\nMemFree:          100000 kB\nMemAvailable:    5000000 kB\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1 = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def machine(root: Path, cgroups: str = "", mounts: str = "", limits: dict[str, str] | None = None) -> Path:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroups, "proc/self/mountinfo": mounts, **(limits or {})}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_of_a_machine_without_limits(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert (usable_memory(root), free_memory(root)) == (8_000_000 * 1024, 5_000_000 * 1024)


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"a/b/memory.max": "1000000"}, 1_000_000),
        ({"a/b/memory.max": "max", "a/memory.max": "2000000"}, 2_000_000),
        ({"a/b/memory.max": "max"}, 8_000_000 * 1024),
        ({"a/b/memory.max": "99999999999999"}, 8_000_000 * 1024),
        ({"a/b/memory.max": "word"}, 8_000_000 * 1024),
    ],
)
def test_a_limit_of_any_cgroup_above_counts(limits: dict[str, str], wanted: int, tmp_path: Path) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    assert usable_memory(machine(tmp_path, "0::/a/b", V2, files)) == wanted


def test_version_1_has_a_tree_for_memory(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "3000000"}
    assert usable_memory(machine(tmp_path, "5:memory:/a\n4:cpu:/", V1, files)) == 3_000_000
    assert usable_memory(machine(tmp_path / "else", "5:cpu:/a", V1, files)) == 8_000_000 * 1024


def test_where_the_system_says_nothing(tmp_path: Path) -> None:
    assert (usable_memory(tmp_path), free_memory(tmp_path)) == (0, 0)


ARENAS = """
import ctypes, sys, threading
from kernels.memory import keep_heap_steady
if sys.argv[1] == "steady":
    keep_heap_steady()
held, start = [], threading.Barrier(4)
def allocate():
    start.wait()
    for _ in range(200):
        held.append(bytearray(50_000))
    start.wait()  # all are alive, so that each may have a heap of its own
threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
ctypes.CDLL(None).malloc_stats()
"""


@pytest.mark.parametrize("how", ["steady", "apart"])
def test_threads_share_one_heap_that_is_kept_steady(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ARENAS, how], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    if "Arena 0:" not in done.stderr:
        pytest.skip("the C library is not glibc: its malloc tells of no arenas")
    assert ("Arena 1:" in done.stderr) is (how == "apart")


FAULTS = """
import resource, sys
from kernels.memory import keep_heap_steady
if sys.argv[1] == "steady":
    keep_heap_steady()
def come_and_go():
    held = [bytes(1 << 20) for _ in range(8)]
for _ in range(50):
    come_and_go()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    come_and_go()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_what_messages_leave_is_kept_for_the_next() -> None:
    faults = {
        how: int(subprocess.check_output([sys.executable, "-c", FAULTS, how], cwd=ROOT, text=True, timeout=60))
        for how in ("steady", "plain")
    }
    if faults["plain"] < 1000:
        pytest.skip("the C library is not glibc: its malloc keeps what is let go of")
    assert faults["steady"] < 100
