"""How much memory this process may use: the machine's, bounded by its cgroups."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

from .cgroups import folders, read

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  #: of glibc's malloc.h
_HEAP = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: 4 << 20, _M_TRIM_THRESHOLD: 16 << 20}


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


def keep_heap_steady() -> None:
    """Have the C library's heap stay as it is in a process that lives for weeks; before its threads begin. For glibc.

    It gives each thread a heap of its own, and what connections that come and go leave free in one is of no use to
    others: there is one for all from here on. Blocks that come and go by the megabyte, as messages do, come from it,
    and what they leave is kept for the next: else the system takes their pages back, to clear them anew each time.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in _HEAP.items():
            library.mallopt(option, value)
