"""How many cores this process may compute on: its affinity, one thread of each core, its cgroups' quotas.

Reads the system's own tables and changes nothing. What is absent or makes no sense sets no bound.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path

from . import cgroups
from .cgroups import read

#: Which CPUs share a core. The lists come first: on some ARM systems a core's id is unique only within its cluster.
_SIBLINGS = (("core_cpus_list",), ("thread_siblings_list",), ("physical_package_id", "core_id"))


def usable_cores(root: Path = Path("/"), cpus: Set[int] | None = None) -> int:
    """Physical cores available to this process, at least 1.

    `cpus` are the logical CPUs it may run on (None: as the system says); `root` is the folder that holds `sys` and
    `proc`. A quota of CPU time counts as so many cores, rounded up.
    """
    if cpus is None:
        cpus = _affinity()
    cores = len({_core_of(root, cpu) for cpu in cpus})
    return max(1, min([cores, *_quotas(root)]))


def _affinity() -> Set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core_of(root: Path, cpu: int) -> tuple[str, ...]:
    """What all CPUs of a core have in common, and no other has."""
    topology = root / "sys/devices/system/cpu" / f"cpu{cpu}" / "topology"
    for names in _SIBLINGS:
        found = tuple(read(topology / name) for name in names)
        if all(found):
            return (names[0], *found)
    return ("cpu", str(cpu))


def _quotas(root: Path) -> Iterator[int]:
    """The bound of each cgroup that this process is in."""
    for version, folder in cgroups.folders("cpu", root):
        if quota := _quota_v2(folder) if version == 2 else _quota_v1(folder):
            yield quota


def _quota_v2(folder: Path) -> int:
    quota, _, period = read(folder / "cpu.max").partition(" ")
    return _cores_of(quota, period)


def _quota_v1(folder: Path) -> int:
    return _cores_of(read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us"))


def _cores_of(quota: str, period: str) -> int:
    """Microseconds of CPU time in a period as cores, rounded up; 0 where they set no bound (`max`, -1)."""
    if not (quota.isascii() and quota.isdecimal() and period.isascii() and period.isdecimal()):
        return 0
    time, span = int(quota[:18]), int(period[:18])
    return -(-time // span) if time and span else 0
