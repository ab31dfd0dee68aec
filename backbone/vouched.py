"""Which calls of a worker were audited and found right, and by whose word: a liar's word counts for nothing. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

Vouchers = frozenset[str]  #: workers whose rows were the measure; empty: the backbone's own were


@dataclass(slots=True)
class Vouched:
    """A worker's calls that were found right. Kept by who vouched: a number each, however many calls there were."""

    _whole: Counter[Vouchers] = field(default_factory=Counter)
    _last: dict[Vouchers, int] = field(default_factory=dict)

    def add(self, call: int, by: Vouchers, *, is_whole: bool) -> None:
        """Nothing wrong was found in this call of the worker's; `is_whole`: and every row of it was looked at."""
        self._last[by] = max(call, self._last.get(by, 0))
        self._whole[by] += is_whole

    def sure(self, liars: Set[str]) -> int:
        """How many calls are right in every row, as far as none of these vouched for it."""
        return sum(count for by, count in self._whole.items() if by.isdisjoint(liars))

    def last(self, liars: Set[str]) -> int:
        """Its call that was found right last by anybody but these; 0: none was."""
        return max((call for by, call in self._last.items() if by.isdisjoint(liars)), default=0)
