"""Which numeric class computes which expert: a value with a digest. The dispatcher has the one that is in force."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .provenance import class_map_digest


@dataclass(frozen=True)
class ClassMap:
    """The class of each layer's experts, beside the backbone's own."""

    own: str  #: class of the rows that the backbone computes itself
    dense: str  #: class of all that is no expert row: the backbone's, with how it keeps keys and values
    experts: Mapping[int, tuple[str, ...]]  #: layer to the class of each expert

    @classmethod
    def of_backbone(cls, own: str, counts: Mapping[int, int], dense: str = "") -> ClassMap:
        """The map without workers. `counts`: layer to its number of experts; `dense`: as `own` where it is left out."""
        return cls(own, dense or own, {layer: (own,) * count for layer, count in counts.items()})

    @cached_property
    def digest(self) -> str:
        """sha256 of the whole map: equal ones, in the same model, give equal bits."""
        return class_map_digest(self.dense, self.experts)

    def of(self, layer: int, expert: int) -> str:
        """The class of an expert."""
        return self.experts[layer][expert]

    def given(self, classes: Mapping[tuple[int, int], str]) -> ClassMap:
        """This map with the classes of some (layer, expert) replaced."""
        experts = {
            layer: tuple(classes.get((layer, expert), kind) for expert, kind in enumerate(kinds))
            for layer, kinds in self.experts.items()
        }
        return ClassMap(self.own, self.dense, experts)

    def taken_over(self, experts: Iterable[tuple[int, int]]) -> ClassMap:
        """This map with some (layer, expert) given to the backbone; itself where they are of its class already."""
        others = [key for key in experts if self.of(*key) != self.own]
        return self.given(dict.fromkeys(others, self.own)) if others else self


@dataclass(frozen=True, slots=True)
class MapChange:
    """A new class map took the place of another: digests of both."""

    before: str
    after: str
