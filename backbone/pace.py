"""How long a worker takes for calls, learnt from its answers in one session. Pure: times come in, none is read here.

Calls of like size, which is the same powers of two of experts and of rows, share an estimate: a smoothed time and its
smoothed deviation, as TCP keeps them of round trips (RFC 6298). The first answer of each size is not counted: kernels
may have been compiled for it. One answer that took out of all proportion moves an estimate by no more than a factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median_low

NEEDED = 4  #: answers before an estimate is believed
STALE_S, STALE_ROWS = 5.0, 1000  #: that others work, or that a worker could do rows, before it is measured anew
OUTLIER = 4.0  #: no answer counts for more than so many times what was expected at most
_SMOOTH, _SMOOTH_DEVIATION = 1 / 8, 1 / 4
_AT_MOST = 3.0  #: deviations above the mean that next to no call exceeds


@dataclass(slots=True)
class _Estimate:
    """Of calls of one size, in seconds."""

    answers: int = -1  #: that count
    mean_s: float = 0.0
    deviation_s: float = 0.0
    most_s: float = 0.0  #: next to no call takes longer

    def add(self, taken_s: float) -> None:
        self.answers += 1
        if self.answers > 1:
            if taken_s > OUTLIER * self.most_s:
                taken_s = OUTLIER * self.most_s
            off_s = taken_s - self.mean_s
            self.deviation_s += _SMOOTH_DEVIATION * ((off_s if off_s > 0.0 else -off_s) - self.deviation_s)
            self.mean_s += _SMOOTH * off_s
        elif self.answers == 1:
            self.mean_s, self.deviation_s = taken_s, taken_s / 2
        self.most_s = self.mean_s + _AT_MOST * self.deviation_s


@dataclass(slots=True)
class Pace:
    """One worker's estimates."""

    s_per_row: float = 0.0  #: of computing, smoothed over calls of any size; 0 while it is not known
    _first_s: list[float] = field(default_factory=list)  #: each row of the first NEEDED answers
    _sizes: dict[tuple[int, int], _Estimate] = field(default_factory=dict)

    def answered(
        self,
        experts: int,
        rows: int,
        round_trip_s: float,
        since_last_s: float,
        compute_s: float,
        others_s: float = 0.0,
    ) -> None:
        """An answer came: so long after the call went, so long after the worker's last answer, computed in so long.

        `others_s`: how long others have worked since the worker's last answer.

        Of a call that stood behind others only its own time counts. That is not less than what the worker says that it
        computed, for answers may have waited here together; nor is it ever more than the round trip.
        """
        taken_s = compute_s if compute_s > since_last_s else since_last_s
        if taken_s > round_trip_s:
            taken_s = round_trip_s
        size = experts.bit_length(), rows.bit_length()
        estimate = self._sizes.get(size)
        if estimate is None:
            estimate = self._sizes[size] = _Estimate()
        estimate.add(taken_s)
        if self.s_per_row and others_s > self._believed_s:  # as the first answer: it may have had to be woken
            self.s_per_row = 0.0
            self._first_s.clear()
        elif estimate.answers > 0:
            # What it computed, not how long that took to come: a call's own cost would make whoever gets few rows look
            # slow, and get fewer still.
            self._learn(min(compute_s, round_trip_s) / rows)

    def _learn(self, each_s: float) -> None:
        """What a row took. Who seems slow is asked no more, so that no one slow answer may settle it."""
        if len(self._first_s) < NEEDED:
            self._first_s.append(each_s)
            if len(self._first_s) == NEEDED:
                self.s_per_row = median_low(self._first_s)
        else:
            before_s = self.s_per_row
            if each_s > OUTLIER * before_s:
                each_s = OUTLIER * before_s
            self.s_per_row = before_s + _SMOOTH * (each_s - before_s)

    def row_s(self, others_s: float) -> float:
        """Seconds a row, 0 while not known: others have worked for so long since this one answered last."""
        return self.s_per_row if others_s <= self._believed_s else 0.0

    @property
    def _believed_s(self) -> float:
        return max(STALE_S, STALE_ROWS * self.s_per_row)

    def most_s(self, experts: int, rows: int) -> float | None:
        """What a call takes at most, as far as calls of its size were measured; None when they were not."""
        estimate = self._sizes.get((experts.bit_length(), rows.bit_length()))
        return None if estimate is None or estimate.answers < NEEDED else estimate.most_s

    def bound_s(self, experts: int, rows: int) -> float | None:
        """As `most_s`, where need be by way of other sizes; None when nothing was measured.

        A call that has no more experts and no more rows than n times those of another takes no more than n times as
        long, whatever an expert costs, a row, and a call as such.
        """
        bounds = [
            estimate.most_s * max(1.0, experts / (1 << log_experts - 1), rows / (1 << log_rows - 1))
            for (log_experts, log_rows), estimate in self._sizes.items()
            if estimate.answers >= NEEDED
        ]
        return min(bounds, default=None)
