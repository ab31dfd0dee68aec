"""Which worker holds which expert: a pure function of sizes, budgets, classes. Covers first, balances every layer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that experts can be given to."""

    name: str
    memory_bytes: int  #: for experts; 0: no bound of its own
    takes_copies: bool = False  #: may hold experts that others of its class hold too, as far as its memory goes
    numeric_class: str = ""  #: of its rows


@dataclass(frozen=True, slots=True)
class Plan:
    """Experts by worker and layer, and what fits nowhere and stays on the backbone."""

    holds: Mapping[str, Mapping[int, tuple[int, ...]]]
    left_over: Mapping[int, tuple[int, ...]]
    left_over_bytes: int = 0
    budget_bytes: int = 0  #: of all workers together

    def describe(self) -> str:
        """One line about what does not fit, with numbers; empty when everything does."""
        count = sum(map(len, self.left_over.values()))
        if not count:
            return ""
        held = sum(len(experts) for layers in self.holds.values() for experts in layers.values())
        return (
            f"{count} of {count + held} experts ({self.left_over_bytes / 1e6:.1f} MB) do not fit the workers' memory, "
            f"{self.budget_bytes / 1e6:.1f} MB in all, and are computed by the backbone; raise --worker-memory"
        )


def place(expert_bytes: Mapping[int, Sequence[int]], candidates: Sequence[Candidate]) -> Plan:
    """Place every expert once, then copies. `expert_bytes`: layer to bytes of each expert.

    Each worker gets an equal share of every layer, or where its memory is too small for that, a smaller one of every
    layer, so that no layer has to wait for one worker alone. That fixes the class of each expert. Who takes copies gets
    them, of experts of its class and alike in all layers, with what memory is left: of several holders the least loaded
    one is asked. The result depends on nothing else: the same inputs give the same plan.
    """
    total = sum(map(sum, expert_bytes.values()))
    room = {c.name: c.memory_bytes or total for c in candidates}
    shares = _shares(room, total)
    is_covered = sum(shares.values()) > 0.999
    owed = dict.fromkeys(room, 0.0)
    holds: dict[str, dict[int, list[int]]] = {name: {} for name in room}
    left: list[tuple[int, int]] = []
    for layer, sizes in expert_bytes.items():
        for name, share in shares.items():
            owed[name] += share * sum(sizes)
        for expert, size in enumerate(sizes):
            # Where shares do not cover a layer, its rest stays here: room is kept for the layers to come.
            able = [name for name in room if room[name] >= size and (is_covered or owed[name] > 0)]
            if not able:
                left.append((layer, expert))
                continue
            below = _below_their_part(able, layer, len(sizes), shares, holds)
            _give(max(below, key=owed.__getitem__), layer, expert, size, holds, room, owed)
    for layer, expert in tuple(left):
        size = expert_bytes[layer][expert]
        able = [name for name in room if room[name] >= size]
        if able:
            left.remove((layer, expert))
            _give(max(able, key=room.__getitem__), layer, expert, size, holds, room, owed)
    classes = class_of_experts(holds, candidates)
    for candidate in candidates:
        if candidate.takes_copies:
            mine = [key for key, kind in classes.items() if kind == candidate.numeric_class]
            _copy(candidate.name, mine, expert_bytes, holds, room, owed)
    return _plan(holds, left, expert_bytes, candidates)


def _below_their_part(
    able: Sequence[str],
    layer: int,
    experts: int,
    shares: Mapping[str, float],
    holds: Mapping[str, Mapping[int, Sequence[int]]],
) -> Sequence[str]:
    """Those that have less than their part of a layer, rounded down; else, rounded up; else all."""
    for rounded in (math.floor, math.ceil):
        below = [n for n in able if len(holds[n].get(layer, ())) < rounded(round(shares[n] * experts, 6))]
        if below:
            return below
    return able


def class_of_experts(
    holds: Mapping[str, Mapping[int, Sequence[int]]], candidates: Sequence[Candidate]
) -> dict[tuple[int, int], str]:
    """The numeric class of each (layer, expert) that is held by a worker: that of the first candidate that does."""
    found: dict[tuple[int, int], str] = {}
    for candidate in candidates:
        for layer, experts in holds.get(candidate.name, {}).items():
            for expert in experts:
                found.setdefault((layer, expert), candidate.numeric_class)
    return found


def _copy(
    name: str,
    may_hold: Collection[tuple[int, int]],
    expert_bytes: Mapping[int, Sequence[int]],
    holds: dict[str, dict[int, list[int]]],
    room: dict[str, int],
    owed: dict[str, float],
) -> None:
    """Fill a worker's memory with experts that it may hold and does not, one of each layer in turn."""
    waiting: dict[int, list[int]] = {layer: [] for layer in expert_bytes}
    held = {(layer, expert) for layer, experts in holds[name].items() for expert in experts}
    for layer, expert in sorted(set(may_hold) - held):
        waiting[layer].append(expert)
    while waiting:
        for layer in list(waiting):
            if not waiting[layer] or room[name] < expert_bytes[layer][waiting[layer][0]]:
                del waiting[layer]
                continue
            expert = waiting[layer].pop(0)
            _give(name, layer, expert, expert_bytes[layer][expert], holds, room, owed)


def _give(
    name: str,
    layer: int,
    expert: int,
    size: int,
    holds: dict[str, dict[int, list[int]]],
    room: dict[str, int],
    owed: dict[str, float],
) -> None:
    holds[name].setdefault(layer, []).append(expert)
    room[name] -= size
    owed[name] -= size


def _shares(room: Mapping[str, int], total: int) -> dict[str, float]:
    """Each worker's part of all bytes: equal ones, but what is too much for one is shared out among the others."""
    shares = dict[str, float]()
    left = 1.0
    for waiting, name in enumerate(sorted(room, key=room.__getitem__)):
        shares[name] = min(left / (len(room) - waiting), room[name] / total if total else 0.0)
        left -= shares[name]
    return {name: shares[name] for name in room}


def _plan(
    holds: Mapping[str, Mapping[int, list[int]]],
    left: Sequence[tuple[int, int]],
    expert_bytes: Mapping[int, Sequence[int]],
    candidates: Sequence[Candidate],
) -> Plan:
    left_over: dict[int, tuple[int, ...]] = {}
    for layer, expert in sorted(left):
        left_over[layer] = (*left_over.get(layer, ()), expert)
    return Plan(
        {name: {layer: tuple(sorted(e)) for layer, e in sorted(layers.items())} for name, layers in holds.items()},
        left_over,
        sum(expert_bytes[layer][expert] for layer, expert in left),
        sum(c.memory_bytes for c in candidates),
    )
