"""What a worker says of itself: the numeric class of its rows. Knows nothing of how they are computed."""

from __future__ import annotations

from dataclasses import dataclass

#: Element types in which rows may cross the wire.
WIRE_DTYPES = ("f32",)


@dataclass(frozen=True, slots=True)
class ClassInfo:
    """A numeric class: everything in a computation that can change a bit of an expert row."""

    name: str
    accumulation: str  #: precision in which products are summed
    activations: str  #: precision of the activations that are multiplied

    def __str__(self) -> str:
        return f"{self.name}/{self.activations}/{self.accumulation}"


def class_refusal(theirs: ClassInfo, wire_dtypes: tuple[str, ...], ours: ClassInfo) -> str:
    """Why a worker's rows cannot stand in for the backbone's own, in one line; empty when they can.

    Whoever may take over a dead worker's calls has to be of its class, and for now that is the backbone alone.
    """
    if theirs != ours:
        return f"its numeric class is {theirs}, the backbone's is {ours}: the bits would differ"
    if not set(wire_dtypes) & set(WIRE_DTYPES):
        return f"it sends rows as {', '.join(wire_dtypes) or 'nothing'}; the backbone takes {', '.join(WIRE_DTYPES)}"
    return ""
