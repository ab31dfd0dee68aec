"""A call's rows: each pair's row through its expert. Knows no messages and no sockets.

Legend: R distinct rows, P pairs of (row, expert), D width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kernels.interface import F32, Backend, ExpertWeights

from .errors import WorkerError

I32 = NDArray[np.int32]


def pair_rows(backend: Backend, experts: Mapping[int, ExpertWeights], x: F32, pairs: I32) -> tuple[F32, int]:
    """Unweighted rows [P, width] float32 for pairs [P, 2] over x [R, D], and the nanoseconds that computing took.

    A row's bits do not depend on what else is in the call. WorkerError for a pair that cannot be.
    """
    places = _places(experts, x, pairs)
    out = np.empty((len(pairs), next(experts[e].down.rows for e in places)), np.float32)
    started = time.perf_counter_ns()
    for expert, at in places.items():
        # One row is one view; several are gathered.
        inputs = x[at[0][1] : at[0][1] + 1] if len(at) == 1 else x[[row for _, row in at]]
        rows = backend.expert_rows(experts[expert], inputs)
        if len(at) == 1:
            out[at[0][0]] = rows[0]
        else:
            out[[place for place, _ in at]] = rows
    return out, time.perf_counter_ns() - started


def _places(experts: Mapping[int, ExpertWeights], x: F32, pairs: I32) -> dict[int, list[tuple[int, int]]]:
    """For each expert the places in the answer that it fills, with the row for each."""
    places: dict[int, list[tuple[int, int]]] = {}
    for place, (row, expert) in enumerate(pairs.tolist()):
        if not 0 <= row < len(x):
            raise WorkerError(f"a pair of row {row}; {len(x)} rows came")
        places.setdefault(expert, []).append((place, row))
    widths = set()
    for expert in places:
        weights = experts.get(expert)
        if weights is None:
            raise WorkerError(f"expert {expert} is not held here")
        if weights.gate.cols != x.shape[1]:
            raise WorkerError(f"rows of {x.shape[1]} values for expert {expert}, which takes {weights.gate.cols}")
        widths.add(weights.down.rows)
    if len(widths) != 1:
        raise WorkerError(f"experts of one call give rows of {sorted(widths)} values")
    return places
