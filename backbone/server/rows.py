"""`/private/rows`: rows of one worker's experts, for whoever measures how far it is from others. Pure but for `ask`.

Rows travel as base64 of little-endian float32 in JSON: a tolerance run is no hurry, and the token of the run file is
asked for as by every private endpoint.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.interface import F32, I32

from ..errors import UsageError
from ..swarm import Swarm
from .errors import field_error

MOST_PAIRS = 1 << 16

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """What is asked of a worker: x [R, D], and pairs [P, 2] of (row of x, expert)."""

    worker: str
    layer: int
    x: F32
    pairs: I32


def parse_worker(body: Fields) -> str:
    """The name of a worker."""
    if not isinstance(name := body.get("worker"), str) or not name:
        raise field_error("worker", "is no name")
    return name


def parse_rows(body: Fields) -> Rows:
    """A request, checked as far as that needs no model. ApiError names the field."""
    layer, width, pairs = body.get("layer"), body.get("width"), body.get("pairs")
    if type(layer) is not int:
        raise field_error("layer", "is no number")
    if type(width) is not int or width < 1:
        raise field_error("width", "is no number of values")
    try:
        data = base64.b64decode(body.get("x", ""), validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise field_error("x", "is no base64") from None
    if not data or len(data) % (4 * width):
        raise field_error("x", f"{len(data)} bytes are no rows of {width} float32 values")
    x = np.frombuffer(data, "<f4").reshape(-1, width)
    are_pairs = isinstance(pairs, list) and 0 < len(pairs) <= MOST_PAIRS
    if not are_pairs or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 <= n < 1 << 31 for n in pair)
        for pair in pairs  # type: ignore[union-attr]
    ):
        raise field_error("pairs", f"is no list of 1 to {MOST_PAIRS} pairs of row and expert")
    asked = np.array(pairs, np.int32)
    if asked[:, 0].max() >= len(x):
        raise field_error("pairs", f"names row {asked[:, 0].max()} of {len(x)}")
    return Rows(parse_worker(body), layer, x, asked)


def held(swarm: Swarm | None, name: str) -> dict[str, Any]:
    """What a worker is and holds. UsageError when there is none of this name."""
    live = [] if swarm is None else swarm.live()
    found = next((worker for worker in live if worker.name == name), None)
    if swarm is None or found is None:
        names = ", ".join(worker.name for worker in live) or "none"
        raise UsageError(f"no worker {name[:60]!r} serves; there are: {names}")
    report = next(report for report in swarm.report() if report.name == name)
    return {
        "name": name,
        "backend": report.backend,
        "device": report.device,
        "class": report.numeric_class,
        "holds": {str(layer): sorted(experts) for layer, experts in found.holds.items()},
    }


def answered(swarm: Swarm | None, asked: Rows) -> dict[str, Any]:
    """The rows [P, D'] of a worker. UsageError for what it does not hold, BackboneError when it does not answer."""
    holds = held(swarm, asked.worker)["holds"].get(str(asked.layer), [])
    if missing := sorted(set(asked.pairs[:, 1].tolist()) - set(holds)):
        raise UsageError(f"worker {asked.worker} does not hold expert {missing[0]} of layer {asked.layer}")
    if swarm is None:
        raise UsageError("there are no workers")
    rows = swarm.rows_of(asked.worker, asked.layer, asked.x, asked.pairs)
    return {"rows": base64.b64encode(np.ascontiguousarray(rows, "<f4").tobytes()).decode(), "width": rows.shape[1]}
