"""Runs a bound model on rows: the flat program, step by step, and the waits in between.

The only place that knows of `experts` and `collect`; every other operation is a function of the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from archdefs import OPS, Program, Step
from kernels.combine import combine
from kernels.interface import F32, DenseBackend
from kernels.matrix import Matrix
from kernels.state import Chosen, Rows, Sequence

from .errors import BackboneError
from .experts import ExpertSource

Tensor = Callable[[str], Matrix]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A step with its function: what runs when it is its turn."""

    kind: str  #: "op", "experts" or "collect"
    function: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    layer: int
    needs_rows: bool = False
    on_weights: bool = False


def _nothing() -> None:
    return None


def _bound(step: Step, backend: DenseBackend, tensor: Tensor) -> _Bound:
    layer = -1 if step.layer is None else step.layer
    if step.op in ("experts", "collect"):
        return _Bound(step.op, _nothing, step.inputs, step.outputs, layer)
    op = OPS[step.op]
    constants: dict[str, Any] = dict(step.constants)
    for arg in (*op.positional, *op.named):
        if arg.kind.is_tensor and arg.name in step.tensors:
            matrix = tensor(step.tensors[arg.name])
            constants[arg.name] = matrix if arg.is_matrix else matrix.vector()
    if op.has_memory:
        constants["memory"] = step.memory
    if op.knows_layer:
        constants["layer"] = layer
    function = backend.operation(step.op, constants)
    return _Bound("op", function, step.inputs, step.outputs, layer, op.needs_rows, step.on_weights)


class Executor:
    """A bound program on a backend. Keeps nothing between runs: memories belong to sequences."""

    def __init__(self, program: Program, backend: DenseBackend, tensor: Tensor) -> None:
        self._program = program
        bind = [[_bound(step, backend, tensor) for step in part] for part in _parts(program)]
        self._prologue, self._layers, self._epilogue = bind[0], bind[1:-1], bind[-1]

    def sequence(self) -> Sequence:
        """A new, empty sequence with the memories that the program needs."""
        return Sequence(self._program.memories)

    def run(self, rows: Rows, experts: ExpertSource) -> Generator[None, None, F32]:
        """Logits [wanted, vocabulary] float32 of the wanted rows. Yields where it would wait for experts."""
        slots: list[Any] = [None] * len(self._program.slot_widths)
        for step in self._prologue:
            self._op(step, slots, rows)
        for layer in self._layers:
            for step in layer:
                if step.kind == "op":
                    self._op(step, slots, rows)
                elif step.kind == "experts":
                    x, chosen = slots[step.inputs[0]], slots[step.inputs[1]]
                    slots[step.outputs[0]] = (experts.send(step.layer, x, chosen.ids), chosen.weights)
                else:
                    ticket, weights = slots[step.inputs[0]]
                    yield
                    slots[step.outputs[0]] = _merged(experts.wait(ticket), weights, step.layer)
            if rows.taps is not None:
                rows.taps.residuals.setdefault(layer[0].layer, []).append(slots[0])
        if not len(rows.wanted):
            return np.empty((0, self._program.slot_widths[self._program.logits]), np.float32)
        for step in self._epilogue:
            self._op(step, slots, rows)
        logits: F32 = slots[self._program.logits]
        if not np.isfinite(logits).all():
            raise BackboneError("the logits are not finite: the model's weights or its definition are at fault")
        return logits

    @staticmethod
    def _op(step: _Bound, slots: list[Any], rows: Rows) -> None:
        inputs = [slots[i] if i >= 0 else None for i in step.inputs]
        chosen: Chosen | None = None
        if step.on_weights:
            chosen = inputs[0]
            inputs[0] = chosen.weights  # type: ignore[union-attr]
        # What overflows or is no number shows in the logits, or in the experts' rows, where it is looked for.
        with np.errstate(all="ignore"):
            result = step.function(*inputs, rows=rows) if step.needs_rows else step.function(*inputs)
        if chosen is not None:
            result = chosen.weighted(result)
        if len(step.outputs) == 1:
            slots[step.outputs[0]] = result
        else:
            for slot, piece in zip(step.outputs, result, strict=True):
                slots[slot] = piece


def _parts(program: Program) -> Seq[Seq[Step]]:
    return (program.prologue, *program.layers, program.epilogue)


def _merged(rows: F32, weights: F32, layer: int) -> F32:
    if not np.isfinite(rows).all():
        raise BackboneError(f"layer {layer}: expert rows are not finite, here as on the workers; the request ends")
    return combine(rows, weights)


def interleave(runs: Seq[Generator[None, None, F32]], at_once: int = 2) -> Generator[F32, None, None]:
    """Drive runs in order, a few at a time in turn: one computes its dense layers while another waits for experts.

    Run i + 1 never overtakes run i in a layer, since each takes one wait a turn and starts after it: a later chunk's
    attention finds the keys of the earlier one in place. Gives each run's logits in order.
    """
    waiting, active = list(runs), list[Generator[None, None, F32]]()
    while waiting or active:
        while waiting and len(active) < at_once:
            active.append(waiting.pop(0))
        for run in tuple(active):
            try:
                next(run)
            except StopIteration as stop:
                active.remove(run)
                yield stop.value
