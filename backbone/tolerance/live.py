"""`worker:NAME`: a worker of the running server as a side. What it holds it computes; all else is computed here.

Its rows are asked for through the server that it serves, between two steps of whatever the server is doing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kernels.combine import pairs_of
from kernels.interface import F32, I32

from ..client import RunningServer, find_server
from ..errors import UsageError
from ..experts import LocalExperts
from ..session import open_session
from ..settings import Setting, Settings
from .sides import ModelSide, Side

MOST_BYTES = 1 << 20  #: of rows in a request; the server takes no body beyond 4 MiB


class LiveExperts:
    """A worker's experts, and those of this process for what it does not hold."""

    is_here = False
    busiest_ns = 0
    class_changes = ()
    doubts = 0

    def __init__(
        self, server: RunningServer, name: str, holds: Mapping[int, Collection[int]], local: LocalExperts
    ) -> None:
        self._server, self._name, self._holds, self._local = server, name, holds, local

    def send(self, layer: int, x: F32, ids: I32) -> F32:
        """Asks and waits."""
        rows, flat = self._local.send(layer, x, ids), ids.reshape(-1)
        theirs = np.isin(flat, list(self._holds.get(layer, ())))
        if not theirs.any():
            return rows
        merged, pairs = rows.reshape(len(flat), -1).copy(), pairs_of(ids)
        step = max(1, MOST_BYTES // (4 * x.shape[1]))
        for at in range(0, len(x), step):
            mine = theirs & (pairs[:, 0] >= at) & (pairs[:, 0] < at + step)
            if mine.any():
                asked = pairs[mine] - np.array([at, 0], np.int32)
                merged[mine] = self._server.rows(self._name, layer, x[at : at + step], asked)
        return merged.reshape(rows.shape)

    def ready(self, ticket: F32) -> bool:
        """Always: the rows are there when `send` returns."""
        return True

    def wait(self, ticket: F32) -> F32:
        """The rows."""
        return ticket

    def abandon(self) -> None:
        """Nothing is under way."""


@contextmanager
def open_live(flag: str, name: str, settings: Settings, context: int) -> Iterator[Side]:
    """A worker of the running server. UsageError where there is no such server or worker."""
    server = find_server(settings.model)
    if server is None:
        raise UsageError(
            f"{flag} worker:{name}: no server serves this model; start 'backbone serve', or name its model with -m"
        )
    told = server.worker(name)
    holds = {int(layer): frozenset(experts) for layer, experts in told["holds"].items()}
    values: dict[str, Any] = {"backend": "auto", "workers": "0", "context": context}
    with open_session(settings.but({key: Setting(value, "side") for key, value in values.items()})) as session:
        classes = {(layer, expert): str(told["class"]) for layer, experts in holds.items() for expert in experts}
        map_of_it = session.class_map().given(classes)
        yield ModelSide(
            session,
            LiveExperts(server, name, holds, session.model.local_experts),
            {
                "asked": f"worker:{name}",
                "kind": "worker",
                "backend": told["backend"],
                "class": told["class"],
                "class_map": map_of_it.digest,
                "device": told["device"],
                "precision": _precision(told["class"]),
                "wire": "f32",
                "experts": sum(map(len, holds.values())),
            },
            numeric_class=map_of_it.digest,
            precision=_precision(told["class"]),
            holds=holds,
        )


def _precision(numeric_class: str) -> str:
    """By the words with which a class ends: activations and accumulation."""
    words: Sequence[str] = numeric_class.split("/")[1:]
    return "f16" if "f16" in words else "i16" if "i16" in words else "f32"
