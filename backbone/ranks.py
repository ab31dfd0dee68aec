"""How exact a worker's rows are by measure, and how exact its numeric class promises that they are. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Rank(StrEnum):
    """From the best to the worst, by the worst row's relative L2 distance from what it would be without rounding."""

    EXACT = "exact"  #: as F32, and the same bits as the class has here
    F32 = "f32"
    I16 = "i16"
    F16 = "f16"
    UNFIT = "unfit"

    @property
    def bar(self) -> float:
        """The most that a row may be off; infinite for what is unfit."""
        return BARS.get(self, float("inf"))

    @property
    def tolerance(self) -> float:
        """The most that a row may be off of whoever says that he is of this rank, where bits cannot tell.

        Most honest rows of I16 are up to 2.4e-4 off, and 1.4e-3 where one column is 20 to 50 times as large as the
        others (the worst of 15,546 probes): no closer bar than that of F16 leaves them all alone.
        """
        return Rank.F16.bar if self is Rank.I16 else self.bar

    @property
    def is_f32(self) -> bool:
        """Whether it is good enough for the layers that matter most."""
        return self in (Rank.EXACT, Rank.F32)

    def keeps(self, promise: Rank) -> bool:
        """Whether it is no worse than what was promised."""
        return _ORDER[self] <= _ORDER[promise]


BARS: Mapping[Rank, float] = {Rank.EXACT: 1e-5, Rank.F32: 1e-5, Rank.I16: 1e-4, Rank.F16: 2e-3}
_ORDER = {rank: place for place, rank in enumerate(Rank)}


def rank_of(worst: float, *, is_same_bits: bool = False) -> Rank:
    """The rank of rows of which the worst is so far off. `is_same_bits`: they are the class's own, bit by bit."""
    if is_same_bits and worst <= BARS[Rank.EXACT]:
        return Rank.EXACT
    return next((rank for rank in (Rank.F32, Rank.I16, Rank.F16) if worst <= BARS[rank]), Rank.UNFIT)


def promised(activations: str, accumulation: str) -> Rank:
    """What a numeric class promises by the dtypes of its activations and of its sums."""
    if accumulation == "f16":
        return Rank.F16
    return Rank.I16 if activations == "i16" else Rank.F32
