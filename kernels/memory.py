"""How much memory this process may use: the machine's, bounded by its cgroups."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

from .cgroups import folders, read

_M_ARENA_MAX = -8  #: of glibc's malloc.h


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes, 0 where the system does not say. `root` is the folder that holds `sys` and `proc`."""
    found = _of_machine("MemTotal", root)
    for version, folder in folders("memory", root):
        limit = read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit.isascii() and limit.isdecimal():  # not `max`
            found = min(found, int(limit[:18])) if found else int(limit[:18])
    return found


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had without pushing others out; 0 where the system does not say. Knows no cgroups."""
    return _of_machine("MemAvailable", root)


def _of_machine(field: str, root: Path) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB$", read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def share_one_arena() -> None:
    """Have all threads of this process allocate from one heap, where the C library is glibc; before they begin.

    It gives each thread one of its own, and what connections that come and go leave free in one is of no use to others:
    a process that lives for weeks grows and grows.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
