"""A bound program: flat lists of steps with slots, tensors' names and numbers. Running it looks no name up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Constant = float | int | str | tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation on slots.

    `experts` sends its rows and fills its slot with what is in flight; a `collect` step on the same slot stands
    before the first step that mentions the result, and waits.
    """

    op: str
    line: int  #: in the definition
    inputs: tuple[int, ...]  #: slots, in the op table's order; -1 for a named register that was not given
    outputs: tuple[int, ...]  #: slots; for an operation in place the one that it changes
    tensors: Mapping[str, str]  #: argument to the tensor's name in the file
    constants: Mapping[str, Constant]  #: argument or fact to its value
    layer: int | None  #: None in prologue and epilogue
    memory: int | None = None  #: which of a sequence's memories the step owns
    kept: int = 0  #: values that it keeps there for each position
    on_weights: bool = False  #: changes the weights of what top_k gave


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a definition says for one model.

    `slot_widths`: the most values a row that each slot holds. Slot 0 is the residual.
    """

    prologue: tuple[Step, ...]
    layers: tuple[tuple[Step, ...], ...]
    epilogue: tuple[Step, ...]
    slot_widths: tuple[int, ...]
    logits: int  #: the slot that holds the result
    memories: int  #: how many steps keep a memory
    warnings: tuple[str, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in the order in which they run."""
        return (*self.prologue, *(step for layer in self.layers for step in layer), *self.epilogue)
