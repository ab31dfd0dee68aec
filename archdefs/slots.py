"""Which slot holds which register, reused as soon as a register has been mentioned for the last time."""

from __future__ import annotations

from collections.abc import Iterable

from .program import Step


class Slots:
    """Slots of a program in the making. Slot 0 is `x`, which lives through all layers."""

    def __init__(self) -> None:
        self._widths: list[int] = []
        self._free: list[int] = []
        self._held: dict[str, int] = {}
        self._flying: set[str] = set()

    @property
    def widths(self) -> tuple[int, ...]:
        """The most values a row that each slot has to hold."""
        return tuple(self._widths)

    def of(self, register: str) -> int:
        """The slot of a register that holds a value."""
        return self._held[register]

    def give(self, register: str, width: int) -> int:
        """The slot for a register that is written: its own, a free one, or a new one."""
        if register not in self._held:
            if self._free and register not in ("x", "logits"):
                self._held[register] = self._free.pop()
            else:
                self._held[register] = len(self._widths)
                self._widths.append(0)
        slot = self._held[register]
        self._widths[slot] = max(self._widths[slot], width)
        return slot

    def free(self, registers: Iterable[str]) -> None:
        """Give up registers that no later step mentions; what is in flight stays until it is collected."""
        for register in list(registers):
            if register in self._held and register not in self._flying:
                self._free.append(self._held.pop(register))

    def in_flight(self, register: str) -> None:
        """Mark a register whose value is still to come."""
        self._flying.add(register)

    def collect_before(self, mentioned: set[str] | None, line: int, layer: int | None) -> list[Step]:
        """`collect` steps for registers in flight that a step mentions (None: the layer ends, so all of them)."""
        steps = list[Step]()
        for register in sorted(self._flying if mentioned is None else self._flying & mentioned):
            slot = self._held[register]
            steps.append(
                Step(
                    op="collect",
                    line=line,
                    inputs=(slot,),
                    outputs=(slot,),
                    tensors={},
                    constants={},
                    layer=layer,
                )
            )
            self._flying.discard(register)
            if mentioned is None:
                self._free.append(self._held.pop(register))
        return steps
