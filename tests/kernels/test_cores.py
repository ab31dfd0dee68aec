"""How many cores there are to compute on, over trees that stand for a machine's /sys and /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels.cores import usable_cores


class Machine:
    """A machine's tables, as files under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> Machine:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        return self

    def cpu(self, number: int, **topology: str) -> Machine:
        for name, text in topology.items():
            self.write(f"sys/devices/system/cpu/cpu{number}/topology/{name}", text)
        return self

    def mounted(self, *lines: str) -> Machine:
        return self.write("proc/self/mountinfo", "\n".join(["22 27 0:21 / /proc rw - proc proc rw", *lines]))

    def cores(self, cpus: int) -> int:
        return usable_cores(self.root, set(range(cpus)))


V2 = "41 31 0:38 {root} {place} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {root} {place} rw,relatime - cgroup cgroup rw,cpu,cpuacct"


def v2(root: str = "/", place: str = "/sys/fs/cgroup") -> str:
    return V2.format(root=root, place=place)


def v1(root: str = "/", place: str = "/sys/fs/cgroup/cpu,cpuacct") -> str:
    return V1.format(root=root, place=place)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_any_table_each_cpu_is_a_core(machine: Machine) -> None:
    assert machine.cores(3) == 3
    assert machine.cores(0) == 1


def test_this_machine() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            assert usable_cores() == 1
        finally:
            os.sched_setaffinity(0, before)


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_threads_of_one_core_count_once(machine: Machine, name: str) -> None:
    for cpu in range(8):
        machine.cpu(cpu, **{name: f"{cpu % 4},{cpu % 4 + 4}"})
    assert machine.cores(8) == 4
    assert usable_cores(machine.root, {0, 4}) == 1  # both threads of one core
    assert usable_cores(machine.root, {0, 5}) == 2
    assert usable_cores(machine.root, {1, 2, 3}) == 3


def test_a_cores_id_counts_within_its_package(machine: Machine) -> None:
    for cpu in range(8):
        machine.cpu(cpu, core_id=str(cpu % 2), physical_package_id=str(cpu // 4))
    assert machine.cores(8) == 4


def test_clusters_that_number_their_cores_alike(machine: Machine) -> None:
    for cpu in range(6):
        machine.cpu(cpu, core_id=str(cpu % 4), physical_package_id="0", thread_siblings_list=str(cpu))
    assert machine.cores(6) == 6


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("1000 100000", 1),
        ("1600000 100000", 8),
        ("max 100000", 8),
        ("0 100000", 8),
        ("200000 0", 8),
        ("200000", 8),
        ("-1 100000", 8),
        ("²00000 100000", 8),
        ("\x00junk", 8),
        ("9" * 5000 + " 1", 8),
    ],
)
def test_a_quota_is_rounded_up_and_nonsense_is_none(machine: Machine, text: str, cores: int) -> None:
    machine.mounted(v2()).write("proc/self/cgroup", "0::/a").write("sys/fs/cgroup/a/cpu.max", text)
    assert machine.cores(8) == cores


def test_the_narrowest_of_a_cgroup_and_its_parents_counts(machine: Machine) -> None:
    machine.mounted(v2()).write("proc/self/cgroup", "0::/a/b/c")
    machine.write("sys/fs/cgroup/a/b/c/cpu.max", "700000 100000").write("sys/fs/cgroup/a/x/cpu.max", "100000 100000")
    assert machine.cores(8) == 7
    machine.write("sys/fs/cgroup/a/cpu.max", "300000 100000")
    assert machine.cores(8) == 3
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000")  # a namespace's top has one
    assert machine.cores(8) == 2


def test_quotas_of_version_1(machine: Machine) -> None:
    machine.mounted(v1()).write("proc/self/cgroup", "5:memory:/m\n1:cpu,cpuacct:/a/b\n0::/")
    folder = "sys/fs/cgroup/cpu,cpuacct/a"
    machine.write(f"{folder}/b/cpu.cfs_quota_us", "-1").write(f"{folder}/b/cpu.cfs_period_us", "100000")
    assert machine.cores(8) == 8
    machine.write(f"{folder}/cpu.cfs_quota_us", "50000").write(f"{folder}/cpu.cfs_period_us", "20000")
    assert machine.cores(8) == 3


def test_both_versions_side_by_side(machine: Machine) -> None:
    machine.mounted(v1(), v2(place="/sys/fs/cgroup/unified")).write("proc/self/cgroup", "1:cpu,cpuacct:/a\n0::/b")
    machine.write("sys/fs/cgroup/unified/b/cpu.max", "500000 100000")
    assert machine.cores(8) == 5
    machine.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "400000")
    machine.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000")
    assert machine.cores(8) == 4


def test_controllers_that_are_not_the_cpus_bound_nothing(machine: Machine) -> None:
    memory = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    machine.mounted(memory).write("proc/self/cgroup", "4:memory,cpuset:/\n1:name=systemd:/")
    machine.write("sys/fs/cgroup/memory/cpu.cfs_quota_us", "100000")
    machine.write("sys/fs/cgroup/memory/cpu.cfs_period_us", "100000")
    assert machine.cores(8) == 8


@pytest.mark.parametrize("root", ["/docker/abc", "/../.."])
def test_a_container_that_sees_only_its_own_part_of_the_tree(machine: Machine, root: str) -> None:
    machine.mounted(v2(root)).write("proc/self/cgroup", f"0::{root}")
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000")
    assert machine.cores(8) == 2
    machine.write("proc/self/cgroup", "0::/elsewhere")
    assert machine.cores(8) == 2


def test_a_cgroup_below_what_is_mounted(machine: Machine) -> None:
    machine.mounted(v2("/docker/abc")).write("proc/self/cgroup", "0::/docker/abc/inner")
    machine.write("sys/fs/cgroup/inner/cpu.max", "300000 100000")
    assert machine.cores(8) == 3


def test_a_path_cannot_lead_out_of_the_tree(machine: Machine) -> None:
    machine.mounted(v2()).write("proc/self/cgroup", "0::/../../x").write("sys/x/cpu.max", "100000 100000")
    assert machine.cores(8) == 8


def test_a_place_with_a_blank_in_it(machine: Machine) -> None:
    machine.mounted(v2(place=r"/sys/fs/my\040groups")).write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/my groups/cpu.max", "100000 100000")
    assert machine.cores(8) == 1


def test_lines_that_are_cut_short(machine: Machine) -> None:
    machine.mounted("", "1 2 3", "1 2 3 4 5 - cgroup2", " - cgroup2 a b").write("proc/self/cgroup", "\n:\n0\n1:cpu")
    assert machine.cores(8) == 8
