"""Which worker holds which expert: a pure function of sizes and budgets. Covers first, then balances each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that experts can be given to."""

    name: str
    memory_bytes: int  #: 0: no bound of its own


@dataclass(frozen=True, slots=True)
class Plan:
    """Experts by worker and layer, and what fits nowhere and stays on the backbone."""

    holds: Mapping[str, Mapping[int, tuple[int, ...]]]
    left_over: Mapping[int, tuple[int, ...]]

    def describe(self) -> str:
        """One line about what does not fit; empty when everything does."""
        count = sum(map(len, self.left_over.values()))
        if not count:
            return ""
        return f"{count} experts fit no worker's memory and are computed by the backbone; raise --worker-memory"


def place(expert_bytes: Mapping[int, Sequence[int]], candidates: Sequence[Candidate]) -> Plan:
    """Place every expert once. `expert_bytes`: layer to bytes of each expert.

    In each layer an expert goes to the worker that has the fewest of that layer, among those with room for it; of
    equals the first. The result depends on nothing else: the same inputs give the same plan.
    """
    used = {c.name: 0 for c in candidates}
    holds: dict[str, dict[int, tuple[int, ...]]] = {c.name: {} for c in candidates}
    left_over = dict[int, tuple[int, ...]]()
    for layer, sizes in expert_bytes.items():
        given: dict[str, list[int]] = {c.name: [] for c in candidates}
        for expert, size in enumerate(sizes):
            room = [c.name for c in candidates if not c.memory_bytes or used[c.name] + size <= c.memory_bytes]
            if not room:
                left_over[layer] = (*left_over.get(layer, ()), expert)
                continue
            name = min(room, key=lambda n: (len(given[n]), used[n]))
            given[name].append(expert)
            used[name] += size
        for name, experts in given.items():
            if experts:
                holds[name][layer] = tuple(experts)
    return Plan(holds, left_over)
