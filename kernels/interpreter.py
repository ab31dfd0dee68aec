"""A program as one function after the other: those of `reference`, which specify it, or those of the float64 oracle.

Each operation makes new arrays; nothing here is a view that could change under a reader.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import reference
from .combine import combine, is_finite, pairs_of
from .errors import NotFinite
from .interface import F32, Operation
from .parts import parts
from .state import Chosen, KeyValues, Rows, Sequence


@dataclass(frozen=True, slots=True)
class Functions:
    """What operations do, by name, and what is worked out once of an operation's numbers and tensors."""

    operations: Mapping[str, Callable[..., Any]]
    prepared: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]


REFERENCE = Functions(reference.OPERATIONS, reference.PREPARED)


@dataclass(frozen=True, slots=True)
class _Bound:
    function: Callable[..., Any]
    operation: Operation
    needs_rows: bool
    part: int


def _bound(operation: Operation, part: int, functions: Functions) -> _Bound:
    if operation.name == "experts":
        return _Bound(partial(_experts, operation), operation, needs_rows=False, part=part)
    function = functions.operations[operation.name]
    wanted = inspect.signature(function).parameters
    constants = dict(operation.constants)
    if "memory" in wanted:
        constants["memory"] = operation.memory
    if "layer" in wanted:
        constants["layer"] = operation.layer
    prepare = functions.prepared.get(operation.name)
    fixed = partial(function, **(prepare(constants) if prepare else constants))
    return _Bound(fixed, operation, needs_rows="rows" in wanted, part=part)


def _experts(operation: Operation, x: F32, chosen: Chosen) -> F32:
    """The chosen experts' rows, computed here and merged."""
    rows = operation.constants["bank"]().rows(x, pairs_of(chosen.ids))
    if not is_finite(rows):
        raise NotFinite(operation.layer)
    return combine(rows.reshape(*chosen.ids.shape, -1), chosen.weights)


class Interpreter:
    """A program bound to functions."""

    def __init__(self, operations: Seq[Operation], slot_widths: Seq[int], functions: Functions = REFERENCE) -> None:
        both = zip(operations, parts(operations), strict=True)
        self._bound = tuple(_bound(operation, part, functions) for operation, part in both)
        self._slots = len(slot_widths)
        self._memories = 1 + max((operation.memory for operation in operations), default=-1)

    def sequence(self) -> Sequence:
        """A new, empty sequence."""
        return Sequence(tuple(KeyValues() for _ in range(self._memories)))

    def begin(self, rows: Rows, ns: NDArray[np.int64] | None = None) -> InterpretedRun:
        """Start on a batch of rows."""
        return InterpretedRun(self._bound, [None] * self._slots, rows, ns)


class InterpretedRun:
    """A batch on its way through a program."""

    def __init__(self, bound: tuple[_Bound, ...], slots: list[Any], rows: Rows, ns: NDArray[np.int64] | None) -> None:
        self._bound, self._slots, self._rows, self._ns = bound, slots, rows, ns

    def run(self, start: int, stop: int) -> None:
        """Run operations start to stop."""
        # What overflows or is no number shows in the logits, or in the experts' rows, where it is looked for.
        with np.errstate(all="ignore"):
            for bound in self._bound[start:stop]:
                started = perf_counter_ns()
                self._operate(bound)
                if self._ns is not None:
                    self._ns[bound.part] += perf_counter_ns() - started

    def _operate(self, bound: _Bound) -> None:
        operation, slots = bound.operation, self._slots
        inputs = [slots[i] if i >= 0 else None for i in operation.inputs]
        chosen: Chosen | None = None
        if operation.on_weights:
            chosen = inputs[0]
            inputs[0] = chosen.weights  # type: ignore[union-attr]
        result = bound.function(*inputs, rows=self._rows) if bound.needs_rows else bound.function(*inputs)
        if chosen is not None:
            result = chosen.weighted(result)
        if len(operation.outputs) == 1:
            slots[operation.outputs[0]] = result
        else:
            for slot, piece in zip(operation.outputs, result, strict=True):
                slots[slot] = piece

    def values(self, slot: int) -> F32:
        """What a slot holds."""
        values: F32 = self._slots[slot]
        return values

    def chosen(self, slot: int) -> Chosen:
        """What top_k left in a slot."""
        chosen: Chosen = self._slots[slot]
        return chosen

    def put(self, slot: int, values: F32) -> None:
        """Fill a slot."""
        self._slots[slot] = values

    def close(self) -> None:
        """Nothing is held."""
