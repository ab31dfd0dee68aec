"""Which worker holds which expert: a pure function of sizes, memory, speeds, classes, use and what is held already.

Everything that fits is covered first, so that in each layer the slowest worker ends with the rest, and nothing is moved
that balance does not want moved. Then come copies, with what memory is left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from protocol.sizes import size_text

Key = tuple[int, int]  #: layer and expert
Seconds = Callable[[int, int], float]  #: of a worker and a layer

#: An expert stays where it is as long as its layer then takes no more than so many times what a fresh plan would take.
STAYS_WITHIN = 1.05
#: Rows that each expert counts as having had from the beginning: few rows are no proof that an expert is cold.
PRIOR_ROWS = 1
#: The last layers of which one in so many, at least one, is sensitive: what is wrong there nothing makes good again.
SENSITIVE_PART = 4
#: A copy that is there already is worth so many times one that has to be sent.
KEPT_WORTH = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that experts can be given to."""

    name: str
    memory_bytes: int  #: for experts; 0: no bound of its own
    takes_copies: bool = False  #: may hold experts that others of its class hold too, as far as its memory goes
    numeric_class: str = ""  #: of its rows
    speed: float | None = None  #: bytes of experts a second, or all in the same proportion; None or 0: not known
    held: Mapping[int, Collection[int]] = field(default_factory=dict)  #: layer to experts that it has got already
    is_f32: bool = True  #: its rows are as exact as F32: it comes first for the sensitive layers
    is_off: bool = False  #: its rows are not what its class promises: it gets nothing of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Experts that fit nowhere, and what would make them fit.

    Where only some experts have their class fixed, others may take of what is added: then it is the least that helps.
    """

    numeric_class: str | None  #: that they have to be of; None: any
    experts: int
    in_all: int  #: experts that have to be of that class
    nbytes: int  #: of those that do not fit
    workers: tuple[str, ...]  #: that may hold them
    memory_bytes: int  #: of those workers together
    more_each_bytes: int  #: with so much more on each of them all would fit; 0 where there is no such worker
    more_on_one_bytes: int  #: or with so much more on one

    def __str__(self) -> str:
        what = f"{self.experts} of {self.in_all} experts ({size_text(self.nbytes)})"
        if not self.workers:
            kind = "" if self.numeric_class is None else f" of class {self.numeric_class}"
            return f"{what}: there is no worker{kind} to hold them"
        single = len(self.workers) == 1
        whose = "the workers" if self.numeric_class is None else f"the workers of class {self.numeric_class}"
        each = "" if single else f"{size_text(self.more_each_bytes)} more for each of {len(self.workers)}, or "
        return (
            f"{what} do not fit the memory of {whose}, {size_text(self.memory_bytes)} in all: it takes {each}"
            f"{size_text(self.more_on_one_bytes)} more for one (raise --worker-memory, or a worker's own --memory)"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Experts by worker and layer, and what fits nowhere and stays on the backbone."""

    holds: Mapping[str, Mapping[int, tuple[int, ...]]]
    left_over: Mapping[int, tuple[int, ...]]
    shortfalls: tuple[Shortfall, ...] = ()  #: the same as `left_over`, in numbers
    moves: Mapping[str, int] = field(default_factory=dict)  #: bytes that each worker has to get

    def describe(self) -> str:
        """One line about what does not fit, with numbers; empty when everything does."""
        if not self.left_over:
            return ""
        told = "; ".join(map(str, self.shortfalls)) or f"{sum(map(len, self.left_over.values()))} experts"
        return f"{told}; the backbone computes them"


def place(
    expert_bytes: Mapping[int, Sequence[int]],
    candidates: Sequence[Candidate],
    *,
    usage: Mapping[Key, int] | None = None,
    fixed: Mapping[Key, str] | None = None,
) -> Plan:
    """Place every expert once, then copies. `expert_bytes`: layer to bytes of each expert.

    `usage` counts the rows of each (layer, expert) so far: those that had more weigh more. `fixed` names the class of
    each (layer, expert): only workers of that class may hold it, since answers are under way; what it does not name,
    and everything without it, may go to any class, and then has the class of whoever holds it.

    Each worker gets a share of every layer in proportion to its speed, or where its memory is too small for that, a
    smaller one of every layer, so that no layer waits for one worker alone. An expert stays with a worker that has it
    already, unless the layer then took longer (STAYS_WITHIN). Who takes copies gets more of its class, alike in all
    layers: those first whose holders have most to do, with a preference for what it has (KEPT_WORTH). The others keep
    what they have. Of the sensitive layers (SENSITIVE_PART) F32 workers get what they have room for before others get
    any, and who is out of tolerance gets nothing.
    The same inputs give the same plan, whatever the order of the candidates.
    """
    workers = sorted(candidates, key=lambda c: c.name)
    sizes = {layer: tuple(expert_bytes[layer]) for layer in sorted(expert_bytes)}
    fixed = fixed or {}
    done = _covered(sizes, workers, usage, fixed)
    done.copies()
    return Plan(
        {c.name: {la: tuple(sorted(es)) for la, es in done.holds[i].items() if es} for i, c in enumerate(workers)},
        {la: tuple(e for at, e in sorted(done.left) if at == la) for la in sorted({la for la, _ in done.left})},
        tuple(_shortfalls(done, workers, usage, fixed)),
        {c.name: done.bytes_to_move(i) for i, c in enumerate(workers)},
    )


def sensitive_layers(layers: Collection[int]) -> frozenset[int]:
    """The last of some layers."""
    return frozenset(sorted(layers)[-max(1, len(layers) // SENSITIVE_PART) :])


def class_of_experts(
    holds: Mapping[str, Mapping[int, Sequence[int]]], candidates: Sequence[Candidate]
) -> dict[Key, str]:
    """The numeric class of each (layer, expert) that is held by a worker: that of the first candidate that does."""
    found: dict[Key, str] = {}
    for candidate in candidates:
        for layer, experts in holds.get(candidate.name, {}).items():
            for expert in experts:
                found.setdefault((layer, expert), candidate.numeric_class)
    return found


def _covered(
    sizes: Mapping[int, tuple[int, ...]],
    workers: Sequence[Candidate],
    usage: Mapping[Key, int] | None,
    fixed: Mapping[Key, str],
) -> _Placing:
    """Every expert that fits with one worker. What a fresh plan would take bounds what may stay where it is."""
    fresh = _Placing(sizes, workers, usage, fixed)
    fresh.fill()
    if not any(worker.held for worker in workers):
        return fresh
    placing = _Placing(sizes, workers, usage, fixed)
    placing.keep(fresh.seconds)
    placing.fill()
    return placing


class _Placing:
    """A plan in the making. Workers are numbers; a weight is what an expert is expected to read, in no unit."""

    def __init__(
        self,
        sizes: Mapping[int, tuple[int, ...]],
        workers: Sequence[Candidate],
        usage: Mapping[Key, int] | None,
        fixed: Mapping[Key, str],
    ) -> None:
        self.sizes, self.workers, self.fixed = sizes, workers, fixed
        total = sum(map(sum, sizes.values()))
        self.budget = [c.memory_bytes or total for c in workers]
        self.room = list(self.budget)
        self.holds: list[dict[int, set[int]]] = [{} for _ in workers]
        self.left: set[Key] = set()
        self._usage = usage
        self._speeds = _speeds(workers)
        self._once: list[dict[int, set[int]]] = [{la: set() for la in sizes} for _ in workers]  #: without copies
        self._load = [dict.fromkeys(sizes, 0) for _ in workers]  #: weight of those
        self._whole = [0.0] * len(workers)  #: seconds of all layers
        self._held = [
            {la: {e for e in c.held.get(la, ()) if 0 <= e < len(each)} for la, each in sizes.items()} for c in workers
        ]
        is_alike = all(c.is_f32 and not c.is_off for c in workers)
        self._sensitive = frozenset[int]() if is_alike else sensitive_layers(sizes)
        self._of_class: dict[str, list[int]] = {}
        for i, worker in enumerate(workers):
            self._of_class.setdefault(worker.numeric_class, []).append(i)

    def weight(self, layer: int, expert: int) -> int:
        """What an expert is expected to read in a while, in no unit."""
        rows = 1 if self._usage is None else PRIOR_ROWS + self._usage.get((layer, expert), 0)
        return self.sizes[layer][expert] * rows

    def able(self, layer: int, expert: int) -> Sequence[int]:
        """Workers that may hold an expert, whatever room they have."""
        kind = self.fixed.get((layer, expert))
        found = range(len(self.workers)) if kind is None else self._of_class.get(kind, [])
        return [i for i in found if not self.workers[i].is_off] if layer in self._sensitive else found

    def _first(self, layer: int, able: Sequence[int]) -> Sequence[int]:
        """Of those that may have an expert of a layer, those that come first."""
        exact = [i for i in able if self.workers[i].is_f32] if layer in self._sensitive else able
        return exact or able

    def seconds(self, i: int, layer: int) -> float:
        """The longest that a worker with which this one shares a layer takes for its part."""
        alike = self._of_class[self.workers[i].numeric_class] if self.fixed else range(len(self.workers))
        return max(self._load[j][layer] / self._speeds[j] for j in alike)

    def _seconds_with(self, i: int, layer: int, weight: int) -> float:
        return (self._load[i][layer] + weight) / self._speeds[i]

    # ---- once

    def keep(self, fresh: Seconds) -> None:
        """Leave experts with workers that have them, as far as no layer takes much longer than in a fresh plan."""
        # Where a worker has less memory than before, each layer keeps its part of what it has.
        parts = _Parts([[sum(self.sizes[la][e] for e in held[la]) for la in self.sizes] for held in self._held])
        for layer, sizes in self.sizes.items():
            parts.advance()
            bounds = [STAYS_WITHIN * fresh(i, layer) for i in range(len(self.workers))]
            firsts = {e: self._first(layer, self.able(layer, e)) for e in range(len(sizes))}
            holders = {e: [i for i in able if e in self._held[i][layer]] for e, able in firsts.items()}
            order = sorted(holders, key=lambda e: (len(holders[e]), -self.weight(layer, e), e))
            for expert in order:
                self._settle(layer, expert, holders, bounds, parts, set())

    def _settle(
        self,
        layer: int,
        expert: int,
        holders: Mapping[int, Sequence[int]],
        bounds: Sequence[float],
        parts: _Parts,
        seen: set[int],
    ) -> bool:
        """Leave an expert with one that has it; if need be, another of its experts goes to a further holder of that."""
        weight, size = self.weight(layer, expert), self.sizes[layer][expert]
        mine = sorted(
            (i for i in holders[expert] if i not in seen), key=lambda i: (self._seconds_with(i, layer, weight), i)
        )

        def fits(i: int) -> bool:
            return (
                self.room[i] >= size
                and self._seconds_with(i, layer, weight) <= bounds[i]
                and parts.allows(i, size, self.budget[i])
            )

        for i in mine:
            if fits(i):
                self._give(i, layer, expert, parts)
                return True
        for i in mine:
            if i in seen:
                continue
            seen.add(i)
            for other in sorted(self._once[i][layer]):
                self._give(i, layer, other, parts, sign=-1)
                if fits(i) and self._settle(layer, other, holders, bounds, parts, seen):
                    self._give(i, layer, expert, parts)
                    return True
                self._give(i, layer, other, parts)
        return False

    def fill(self) -> None:
        """Give every expert that nobody has been given yet to whoever then ends first, as far as there is room."""
        # Each layer has its part of a worker's memory, so that no layer has to do with what others left.
        parts = _Parts([[self._may_hold(i, la) for la in self.sizes] for i in range(len(self.workers))])
        waiting = list[Key]()
        for layer in self.sizes:
            parts.advance([sum(self.sizes[layer][e] for e in first[layer]) for first in self._once])
            for expert in self._to_give(layer):
                size = self.sizes[layer][expert]
                able = [i for i in self.able(layer, expert) if self.room[i] >= size]
                able = [i for i in able if parts.allows(i, size, self.budget[i])]
                if able:
                    self._give(self._soonest(able, layer, expert), layer, expert, parts)
                else:
                    waiting.append((layer, expert))
        for layer, expert in sorted(waiting, key=lambda key: (-self.sizes[key[0]][key[1]], key)):
            able = [i for i in self.able(layer, expert) if self.room[i] >= self.sizes[layer][expert]]
            if able:
                self._give(self._soonest(able, layer, expert), layer, expert, parts)
            else:
                self.left.add((layer, expert))

    def _may_hold(self, i: int, layer: int) -> int:
        """Bytes of a layer's experts that a worker may hold."""
        sizes = self.sizes[layer]
        if layer in self._sensitive and self.workers[i].is_off:
            return 0
        if not self.fixed:
            return sum(sizes)
        mine = (None, self.workers[i].numeric_class)
        return sum(size for expert, size in enumerate(sizes) if self.fixed.get((layer, expert)) in mine)

    def _to_give(self, layer: int) -> list[int]:
        """Experts of a layer that nobody has been given: those with the least choice first, then the heaviest."""
        given = set().union(*(first[layer] for first in self._once))
        rest = [e for e in range(len(self.sizes[layer])) if e not in given]
        return sorted(rest, key=lambda e: ((layer, e) not in self.fixed, -self.weight(layer, e), e))

    def _soonest(self, able: Sequence[int], layer: int, expert: int) -> int:
        """Who ends this layer first with one expert more; of equals, who has less to do in all layers."""
        weight, among = self.weight(layer, expert), self._first(layer, able)
        if layer in self._sensitive:  # who has it may have had to give way to whoever has no room for it
            among = [i for i in among if expert in self._held[i][layer]] or among
        return min(among, key=lambda i: (self._seconds_with(i, layer, weight), self._whole[i], i))

    def _give(self, i: int, layer: int, expert: int, parts: _Parts, *, sign: int = 1) -> None:
        """Give an expert to a worker, or (sign -1) take it back."""
        change = set.add if sign > 0 else set.remove
        change(self._once[i][layer], expert)
        change(self.holds[i].setdefault(layer, set()), expert)
        size, weight = sign * self.sizes[layer][expert], sign * self.weight(layer, expert)
        self.room[i] -= size
        self._load[i][layer] += weight
        self._whole[i] += weight / self._speeds[i]
        parts.used(i, size)

    # ---- copies

    def copies(self) -> None:
        """Fill the memory of those that take copies; the others keep what they have got, as far as there is room."""
        everything = {layer: range(len(sizes)) for layer, sizes in self.sizes.items()}
        for i, worker in enumerate(self.workers):
            self._copy(i, everything if worker.takes_copies else self._held[i])

    def _copy(self, i: int, of: Mapping[int, Collection[int]]) -> None:
        """Give a worker copies, of each layer in turn, those first whose holders have most to do for them.

        What it has got already is given up only for what is KEPT_WORTH times as hot.
        """
        alike = self._of_class[self.workers[i].numeric_class]
        waiting: dict[int, list[int]] = {}
        for layer in self.sizes:
            if layer in self._sensitive and self.workers[i].is_off:
                continue
            mine = self.holds[i].setdefault(layer, set())
            speed = dict[int, float]()  #: of all holders of an expert that a worker of this class was given
            for j in alike:
                for expert in self.holds[j].get(layer, ()):
                    speed[expert] = speed.get(expert, 0.0) + self._speeds[j]
            for j in alike:  # they may not have been given their copies yet, and most likely keep what they have
                for expert in self._held[j][layer] & speed.keys() - self.holds[j].get(layer, set()):
                    speed[expert] += self._speeds[j] if j != i else 0.0
            wanted = [e for e in of[layer] if e in speed and e not in mine]
            has = self._held[i][layer]
            worth = {e: self.weight(layer, e) / speed[e] * (KEPT_WORTH if e in has else 1) for e in wanted}
            waiting[layer] = sorted(wanted, key=lambda e: (worth[e], -e))
        # First what it has got and no other of the layer is much hotter than: new ones of another would drive it out.
        self._in_turn(i, waiting, lambda layer, expert: expert in self._held[i][layer])
        self._in_turn(i, waiting, lambda layer, expert: True)

    def _in_turn(self, i: int, waiting: Mapping[int, list[int]], may: Callable[[int, int], bool]) -> None:
        """Give a worker the last that waits of each layer in turn, as long as it may have it and there is room."""
        layers = list(waiting)
        while layers:
            for layer in list(layers):
                order = waiting[layer]
                while order and self.room[i] < self.sizes[layer][order[-1]]:
                    order.pop()
                if order and may(layer, order[-1]):
                    expert = order.pop()
                    self.holds[i][layer].add(expert)
                    self.room[i] -= self.sizes[layer][expert]
                else:
                    layers.remove(layer)

    def bytes_to_move(self, i: int) -> int:
        """Bytes that a worker holds and has not got yet."""
        return sum(
            self.sizes[la][e] for la, experts in self.holds[i].items() for e in experts if e not in self._held[i][la]
        )


class _Parts:
    """What the layers so far may take of each worker's memory: their part of all that it could be used for."""

    def __init__(self, by_layer: Sequence[Sequence[int]]) -> None:
        self._so_far = [list(accumulate(layers)) for layers in by_layer]
        self._used = [0] * len(by_layer)
        self._at = -1

    def advance(self, used: Sequence[int] = ()) -> None:
        """The next layer begins. `used`: bytes that each worker gives it already."""
        self._at += 1
        for i, size in enumerate(used):
            self._used[i] += size

    def used(self, i: int, size: int) -> None:
        """So many bytes of a worker's memory are taken."""
        self._used[i] += size

    def allows(self, i: int, size: int, budget: int) -> bool:
        """Whether the layers so far may take so many bytes more of a budget."""
        so_far = self._so_far[i]
        return (self._used[i] + size) * so_far[-1] <= budget * so_far[self._at]


def _speeds(workers: Sequence[Candidate]) -> list[float]:
    """Speeds; one that is not known counts as the median of those that are."""
    known = [c.speed for c in workers if c.speed is not None and 0 < c.speed < math.inf]
    usual = statistics.median(known) if known else 1.0
    return [c.speed if c.speed is not None and 0 < c.speed < math.inf else usual for c in workers]


def _shortfalls(
    done: _Placing, workers: Sequence[Candidate], usage: Mapping[Key, int] | None, fixed: Mapping[Key, str]
) -> Iterable[Shortfall]:
    """What fits nowhere, by the class that it has to be of, with what would make it fit."""
    kinds = {(fixed.get(key), bool(done.able(*key))) for key in done.left}
    for kind, has_any in sorted(kinds, key=lambda kind: (kind[0] is None, kind[0] or "", kind[1])):
        keys = [key for key in done.left if fixed.get(key) == kind and bool(done.able(*key)) == has_any]
        sizes = [done.sizes[layer][expert] for layer, expert in keys]
        able = [workers[i] for i in done.able(*keys[0])]
        short, most, count = sum(sizes), max(sizes), len(able)

        def fits(more: int, those: Collection[str], kind: str | None = kind) -> bool:
            grown = [replace(c, memory_bytes=c.memory_bytes + more) if c.name in those else c for c in workers]
            return not any(fixed.get(key) == kind for key in _covered(done.sizes, grown, usage, fixed).left)

        def least(options: Iterable[int], those: Collection[str]) -> int:
            # The largest always does: were an expert left, each worker had less than its bytes free, too little in all.
            *some, last = sorted(options)
            return next((more for more in some if fits(more, those)), last)

        names = tuple(c.name for c in able)
        each = on_one = 0
        if able:
            part = -(-short // count)
            each = least({part, -(-len(keys) // count) * most, part + most}, names)
            on_one = least({short, short + count * most}, [max(able, key=lambda c: c.memory_bytes).name])
        yield Shortfall(
            numeric_class=kind,
            experts=len(keys),
            in_all=sum(fixed.get((la, e)) == kind for la, each in done.sizes.items() for e in range(len(each))),
            nbytes=short,
            workers=names,
            memory_bytes=sum(c.memory_bytes for c in able),
            more_each_bytes=each,
            more_on_one_bytes=on_one,
        )
