"""How many cores this process may compute on: its affinity, one thread of each core, its cgroups' quotas.

Reads the system's own tables and changes nothing. What is absent or makes no sense sets no bound.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath

_OCTAL = re.compile(r"\\([0-7]{3})")
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
        found = tuple(_read(topology / name) for name in names)
        if all(found):
            return (names[0], *found)
    return ("cpu", str(cpu))


def _quotas(root: Path) -> Iterator[int]:
    """The bound of each cgroup that this process is in, from its own to the outermost one that is mounted here."""
    paths = dict[str, str]()  # by version
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for kind, mounted, place in _mounts(root):
        if kind in paths:
            for folder in _folders(place, mounted, paths[kind]):
                quota = _quota_v2(folder) if kind == "cgroup2" else _quota_v1(folder)
                if quota:
                    yield quota


def _mounts(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Mounted cgroup trees that can bound CPU time: version, the cgroup that is mounted, and where."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        first, _, second = line.partition(" - ")
        fields, options = first.split(), second.split()
        if len(fields) < 5 or len(options) < 3:
            continue
        kind = options[0]
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options[2].split(",")):
            mounted, place = (_OCTAL.sub(lambda m: chr(int(m[1], 8)), field) for field in fields[3:5])
            yield kind, mounted, root / place.lstrip("/")


def _folders(place: Path, mounted: str, path: str) -> Iterator[Path]:
    """The folder of a cgroup and of each one above it. A container may be mounted from elsewhere: then its top."""
    own, top = PurePosixPath(path), PurePosixPath(mounted)
    inside = own.relative_to(top) if own.is_relative_to(top) and ".." not in own.parts else PurePosixPath()
    yield from (place / above for above in (inside, *inside.parents))


def _quota_v2(folder: Path) -> int:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _cores_of(quota, period)


def _quota_v1(folder: Path) -> int:
    return _cores_of(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _cores_of(quota: str, period: str) -> int:
    """Microseconds of CPU time in a period as cores, rounded up; 0 where they set no bound (`max`, -1)."""
    if not (quota.isascii() and quota.isdecimal() and period.isascii() and period.isdecimal()):
        return 0
    time, span = int(quota[:18]), int(period[:18])
    return -(-time // span) if time and span else 0


def _read(file: Path) -> str:
    """A file's text without the white space around it; empty when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
