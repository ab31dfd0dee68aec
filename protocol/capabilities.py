"""What a worker says of itself: the numeric class of its rows. Knows nothing of how they are computed."""

from __future__ import annotations

from dataclasses import dataclass

#: Element types in which rows may cross the wire.
WIRE_DTYPES = ("f32", "f16")


@dataclass(frozen=True, slots=True)
class ClassInfo:
    """A numeric class: everything in a computation that can change a bit of an expert row."""

    name: str
    accumulation: str  #: precision in which products are summed
    activations: str  #: precision of the activations that are multiplied

    def __str__(self) -> str:
        return f"{self.name}/{self.activations}/{self.accumulation}"


def wire_refusal(wire_dtypes: tuple[str, ...], wanted: str) -> str:
    """Why a worker's rows cannot cross the wire, in one line; empty when they can. Any numeric class is welcome."""
    if wanted not in wire_dtypes:
        return f"it sends rows as {', '.join(wire_dtypes) or 'nothing'}; the backbone takes {wanted}"
    return ""
