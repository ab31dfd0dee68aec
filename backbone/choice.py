"""Which holder of an expert gets its rows: the one that will have done them first. Pure.

All holders are of one numeric class, so that the choice cannot change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .calls import Flight, Member, Standing
from .class_map import ClassMap

ALIKE = 2.0  #: workers whose rows take no more than so many times as long as the fastest one's share rows evenly
_LAST = 1e9  #: seconds; behind whoever has less


def holders_of(members: Iterable[Member], class_map: ClassMap) -> dict[tuple[int, int], list[Member]]:
    """Who serves each (layer, expert): members that get calls, of the class that the map gives it."""
    found: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        if member.standing is Standing.SERVING:
            for layer, held in member.holds.items():
                for expert in held.experts if held.is_proven else ():
                    if class_map.of(layer, expert) == member.numeric_class:
                        found.setdefault((layer, expert), []).append(member)
    return found


def choose(holders: Sequence[Member], rows: int, busy_s: Mapping[str, float], s_per_row: Mapping[str, float]) -> Member:
    """The holder of an expert that will have done its rows first, of equals the first."""
    if len(holders) == 1:
        return holders[0]
    best, least = holders[0], math.inf
    for member in holders:
        done_s = busy_s.get(member.name, 0.0) + rows * s_per_row[member.name]
        if done_s < least:
            best, least = member, done_s
    return best


def choose_among(
    holders: Mapping[int, Sequence[Member]],
    load: Mapping[int, int],
    chosen: dict[str, list[int]],
    members: Mapping[str, Member],
    flights: Iterable[Flight],
    worked_s: float,
    now_s: float,
) -> None:
    """Add experts that several hold to what each member is asked for already.

    `load`: rows of each expert. `worked_s`: by all members so far.
    """
    rates = _rates(members, worked_s)
    busy_s = _busy_s(members, flights, rates, now_s)
    for name, given in chosen.items():
        busy_s[name] += sum([load[expert] for expert in given]) * rates[name]
    for expert, able in holders.items():
        rows = load[expert]
        name = choose(able, rows, busy_s, rates).name
        busy_s[name] += rows * rates[name]
        chosen.setdefault(name, []).append(expert)


def _rates(members: Mapping[str, Member], worked_s: float) -> dict[str, float]:
    """Seconds a row of each member; those that are about as fast as the best, or not known, count as the best."""
    known = {name: member.pace.row_s(worked_s - member.worked_s) for name, member in members.items()}
    best = min([rate for rate in known.values() if rate], default=1.0)
    return {name: rate if rate > ALIKE * best else best for name, rate in known.items()}


def _busy_s(
    members: Mapping[str, Member], flights: Iterable[Flight], rates: Mapping[str, float], now_s: float
) -> dict[str, float]:
    """Seconds that each member will be busy with what it was asked for; stragglers are busier than all others."""
    busy = {name: _LAST if member.strays or member.shunned_until_s > now_s else 0.0 for name, member in members.items()}
    for flight in flights:
        busy[flight.call.worker] += flight.call.pairs * rates[flight.call.worker]
    return busy
