"""`worker backends`: what this machine has to compute with, how fast it is, and what to install for the rest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from kernels.errors import KernelError
from kernels.inventory import Candidate, Found, look
from kernels.measure import measure
from kernels.memory import usable_memory

from .errors import UsageError

MOST_SECONDS = 600.0
FIGURES = (
    "type",
    "layer_bytes",
    "decode_gb_s",
    "decode_rounds",
    "prefill_gflop_s",
    "prefill_rounds",
    "prefill_experts",
)
HEADING = ("backend", "device", "memory", "decode GB/s", "prefill GFLOP/s", "class")
NUMBERS = (2, 3, 4)  #: columns
FOOTNOTE = (
    "decode: one row through 8 experts of Q4_K, bytes of weights read a second; prefill: 256 rows an expert.\n"
    "Both through the calls that a worker makes, so with the copies to and from the device."
)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "backends",
        help="show what this machine can compute with and how fast, and what to install for the rest",
        description="Show each backend's devices with what a worker would advertise, measured; and for what is absent "
        "why, and what to install. EXPERTSWARM_OPENCL_DEVICE and EXPERTSWARM_CUDA_DEVICE choose among several devices.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--probe-seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="how long to measure each device (default 2); 0 measures nothing",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Show the backends."""
    seconds: float = args.probe_seconds
    if not 0 <= seconds <= MOST_SECONDS:
        raise UsageError(f"--probe-seconds {seconds:g}: between 0 and {MOST_SECONDS:g}")
    found = collect(seconds, sys.stderr)
    print(json.dumps(found) if args.json else as_text(found))
    return 0


def collect(seconds: float, progress: TextIO) -> dict[str, Any]:
    """Every backend with its devices; a device's figures are None where nothing was measured."""
    backends = list[dict[str, Any]]()
    for found in look():
        devices = [_device(found, one, seconds, progress) for one in found.candidates]
        reason = found.reason
        if not found.setting and devices and devices[0]["class"] is None:  # what the backend itself lacks
            reason, devices = devices[0]["error"], []
        backends.append(
            {
                "backend": found.backend,
                "available": any(not one["error"] for one in devices),
                "reason": reason or None,
                "setting": found.setting or None,
                "devices": devices,
            }
        )
    return {"probe_seconds": seconds, "backends": backends}


def _device(found: Found, one: Candidate, seconds: float, progress: TextIO) -> dict[str, Any]:
    about: dict[str, Any] = {
        "id": one.id or None,
        "device": one.name,
        "is_default": one.is_default,
        "memory_bytes": None,
        "class": None,
        "threads": None,
        **dict.fromkeys(FIGURES),
        "error": None,
    }
    label = " ".join(word for word in (found.backend, one.id) if word)
    if progress.isatty():
        progress.write(f"\r\x1b[Kmeasuring {label}")
        progress.flush()
    try:
        backend = one.open()
        about |= {
            "device": backend.device,
            "memory_bytes": backend.memory_bytes or usable_memory(),
            "class": str(backend.numeric_class),
            "threads": backend.threads,
        }
        if seconds:
            about |= asdict(measure(backend, seconds))
    except (KernelError, MemoryError) as error:
        about["error"] = str(error).removeprefix(f"{found.backend}: ") or "this machine has no memory for the experts"
    finally:
        if progress.isatty():
            progress.write("\r\x1b[K")
            progress.flush()
    return about


def as_text(found: dict[str, Any]) -> str:
    """The same for people: a table, what is absent, how to choose."""
    rows, below = [HEADING], list[str]()
    for backend in found["backends"]:
        name = backend["backend"]
        if backend["reason"]:
            below.append(f"{name}: {backend['reason']}")
        for one in backend["devices"]:
            label = name if one["id"] is None else f"{name} {one['id']}"
            if one["error"]:
                below.append(f"{label}: {one['device']}: {one['error']}")
            else:
                memory = "?" if not one["memory_bytes"] else f"{one['memory_bytes'] / 1e9:.1f} GB"
                rates = (_rounded(one["decode_gb_s"]), _rounded(one["prefill_gflop_s"]))
                rows.append((label, one["device"], memory, *rates, one["class"]))
        if backend["devices"]:
            below += _how_to_choose(backend)
    measured = [FOOTNOTE] if found["probe_seconds"] else []
    return "\n".join([_table(rows), *measured, *below])


def _how_to_choose(backend: dict[str, Any]) -> list[str]:
    if not backend["setting"]:
        return []
    ids = ", ".join(one["id"] for one in backend["devices"])
    default = next((one["id"] for one in backend["devices"] if one["is_default"]), None)
    taken = f"; {default} is taken" if default else ""
    return [f"{backend['backend']}: {backend['setting']} chooses the device, by {ids} or a part of its name{taken}"]


def _rounded(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows with aligned columns; those that hold numbers stand to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        (cell.rjust(w) if i in NUMBERS else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in lines)
