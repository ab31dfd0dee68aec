"""How much memory this process may use: the machine's, bounded by its cgroups."""

from __future__ import annotations

import re
from pathlib import Path

from .cgroups import folders, read


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
