"""What this machine's CPU is called."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_fields() -> dict[str, str]:
    """What /proc/cpuinfo says of the last CPU; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in fields.items()}


def cpu_model() -> str:
    """The CPU's name."""
    return cpu_fields().get("model name") or os.uname().machine
