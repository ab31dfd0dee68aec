"""Where a token's time goes: accumulators that whoever does the work fills. Without a clock nothing is measured.

Parts do not overlap: one thread runs a step, and each nanosecond of it belongs to one part or to none ("other").
"""

from __future__ import annotations

from time import perf_counter_ns

#: dense: attention, norms, head and all else that is named nowhere; router: scores and the choice of experts;
#: dispatch: putting calls together, sending them, taking answers apart; wire: waiting for rows beyond what the busiest
#: worker computed; experts: their rows, here or by the busiest worker; combine: merging rows; sampling: the next token.
PARTS = ("dense", "router", "dispatch", "wire", "experts", "combine", "sampling")


class Clock:
    """Nanoseconds by part. `lap` charges the time since the last `mark` or `lap`; `add` what was measured elsewhere."""

    __slots__ = ("_mark_ns", "ns")

    def __init__(self) -> None:
        self.ns = dict.fromkeys(PARTS, 0)
        self._mark_ns = perf_counter_ns()

    def mark(self) -> None:
        """What comes next begins now; the time since the last lap is charged to no part by this clock."""
        self._mark_ns = perf_counter_ns()

    def lap(self, part: str, *, less: int = 0, into: str = "experts") -> None:
        """Charge the time since the last mark or lap to a part, and begin the next one. KeyError for no part.

        Of it `less` nanoseconds, or all where it was less, go to the part `into`.
        """
        now = perf_counter_ns()
        spent = now - self._mark_ns
        less = min(less, spent)
        self.ns[part] += spent - less
        self.ns[into] += less
        self._mark_ns = now

    def add(self, part: str, nanoseconds: int) -> None:
        """Charge a time to a part. KeyError for no part."""
        self.ns[part] += nanoseconds

    def clear(self) -> None:
        """Begin again from nothing."""
        self.ns = dict.fromkeys(PARTS, 0)
        self.mark()

    def split(self, tokens: int, seconds: float) -> dict[str, float]:
        """Microseconds a token of each part and of "other", for so many tokens in so many seconds of wall time.

        Their sum is the time of a token. "other" is below zero where parts were charged more than went by.
        """
        parts = {part: ns / tokens / 1e3 for part, ns in self.ns.items()}
        return parts | {"other": seconds / tokens * 1e6 - sum(parts.values())}
