"""One layer's `experts` while it is under way: which rows go to which expert, and where each result belongs.

Legend: T rows, K chosen experts a row, D width; a place is t * K + k, the slot of row t's k-th expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.interface import F32, I32

Places = NDArray[np.intp]


class Batch:
    """Rows x [T, D] and expert ids [T, K]. `out` [T, K, width] float32 fills up place by place."""

    def __init__(self, x: F32, ids: I32, width: int) -> None:
        self.x = np.ascontiguousarray(x, np.float32)
        self.out: F32 = np.empty((*ids.shape, width), np.float32)
        self._flat_out = self.out.reshape(-1, width)
        self._slots = ids.shape[1]
        self._ids = ids.reshape(-1)
        self._listed: list[int] = self._ids.tolist()

    def load(self) -> dict[int, int]:
        """Each chosen expert, in order of appearance, with the number of its places."""
        load: dict[int, int] = {}
        for expert in self._listed:
            load[expert] = load.get(expert, 0) + 1
        return load

    def places(self, experts: Sequence[int]) -> Places:
        """Places of some experts, ascending."""
        wanted = frozenset(experts)
        return np.array([place for place, expert in enumerate(self._listed) if expert in wanted], np.intp)

    def inputs_at(self, places: Places) -> int:
        """From how many distinct rows the rows of some places are computed."""
        return len(np.unique(places // self._slots))

    def experts_at(self, places: Places) -> list[int]:
        """The expert of each place."""
        return [self._listed[place] for place in places]

    def request(self, experts: Sequence[int]) -> tuple[F32, I32]:
        """What a worker needs for some experts: their distinct rows [R, D], and pairs [P, 2] of (row of these, expert).

        Pairs are in the order of `places`.
        """
        return self.request_at(self.places(experts))

    def request_at(self, places: Places) -> tuple[F32, I32]:
        """The same for some places [P], in their order, which is ascending."""
        pairs = np.empty((len(places), 2), np.int32)
        pairs[:, 1] = self._ids[places]
        if len(self.x) == 1:
            pairs[:, 0] = 0
            return self.x, pairs
        rows, pairs[:, 0] = np.unique(places // self._slots, return_inverse=True)
        return (self.x if len(rows) == len(self.x) else self.x[rows]), pairs

    def fill(self, experts: Sequence[int], rows: F32, only: Sequence[int] | None = None) -> None:
        """Put rows [P, width], in the order of `places`, where they belong; `only` those of some of the experts."""
        if only is not None:
            places = self.places(experts)
            is_wanted = np.isin(self._ids[places], only)
            self._flat_out[places[is_wanted]] = rows[is_wanted]
        elif len(rows) == len(self._flat_out):
            self._flat_out[:] = rows
        else:
            self._flat_out[self.places(experts)] = rows

    def inputs(self, places: Places) -> F32:
        """The rows [n, D] that belong to places."""
        rows: F32 = self.x[places // self._slots]
        return rows

    def fill_places(self, places: Places, rows: F32) -> None:
        """Put rows [n, width] into these places."""
        self._flat_out[places] = rows
