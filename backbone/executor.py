"""Runs a bound model on rows: the flat program from one swarm boundary to the next, and the waits in between.

The only place that knows of `experts` and `collect` as sending and waiting; what lies between is the backend's to run,
in one call where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from archdefs import OPS, Program, Step
from kernels.combine import combine, is_finite
from kernels.errors import NotFinite
from kernels.interface import F32, DenseBackend, ExpertBank, Operation, Run
from kernels.matrix import Matrix
from kernels.parts import PARTS
from kernels.state import Rows, Sequence, Taps

from .clock import Clock
from .errors import BackboneError
from .experts import ExpertSource

Tensor = Callable[[str], Matrix]
Bank = Callable[[int], ExpertBank]


@dataclass(frozen=True, slots=True)
class _Stop:
    """Where the program is left: before operation `at`."""

    at: int
    kind: str  #: "experts" or "collect" (a swarm's boundaries), "chosen" or "layer" (what taps are told)
    layer: int
    slots: tuple[int, ...]  #: experts: x, chosen, result; collect: result; chosen: scores, chosen; layer: residual


def _operation(step: Step, tensor: Tensor, bank: Bank) -> Operation:
    op, layer = OPS[step.op], -1 if step.layer is None else step.layer
    constants: dict[str, Any] = dict(step.constants)
    if step.op == "experts":
        constants["bank"] = lambda: bank(layer)
    else:
        for arg in (*op.positional, *op.named):
            if arg.kind.is_tensor and arg.name in step.tensors:
                matrix = tensor(step.tensors[arg.name])
                constants[arg.name] = matrix if arg.is_matrix else matrix.vector()
    return Operation(
        name=step.op,
        inputs=step.inputs,
        outputs=step.outputs,
        constants=constants,
        layer=layer,
        memory=-1 if step.memory is None else step.memory,
        on_weights=step.on_weights,
    )


class Executor:
    """A bound program on a backend. Keeps nothing between runs: memories belong to sequences."""

    def __init__(self, program: Program, backend: DenseBackend, tensor: Tensor, bank: Bank) -> None:
        operations, self._stops = list[Operation](), list[_Stop]()
        for step in program.prologue:
            operations.append(_operation(step, tensor, bank))
        for number, layer in enumerate(program.layers):
            for step in layer:
                at = len(operations)
                if step.op == "collect":
                    self._stops.append(_Stop(at, "collect", number, step.outputs))
                    continue
                if step.op == "experts":
                    self._stops.append(_Stop(at, "experts", number, (*step.inputs[:2], *step.outputs)))
                operations.append(_operation(step, tensor, bank))
                if step.op == "top_k":
                    self._stops.append(_Stop(at + 1, "chosen", number, (step.inputs[0], *step.outputs)))
            self._stops.append(_Stop(len(operations), "layer", number, (0,)))
        self._head = len(operations)
        operations += [_operation(step, tensor, bank) for step in program.epilogue]
        self._end = len(operations)
        self._logits, self._vocabulary = program.logits, program.slot_widths[program.logits]
        self._program = backend.program(operations, program.slot_widths)

    def sequence(self) -> Sequence:
        """A new, empty sequence with the memories that the program needs."""
        return self._program.sequence()

    def run(self, rows: Rows, experts: ExpertSource, clock: Clock | None = None) -> Generator[None, None, F32]:
        """Logits [wanted, vocabulary] float32 of the wanted rows. Yields where it would wait for experts."""
        ns = None if clock is None else np.zeros(len(PARTS), np.int64)
        run = self._program.begin(rows, ns)
        try:
            at, tickets = 0, dict[int, Any]()
            for stop in self._stops:
                is_boundary = stop.kind in ("experts", "collect")
                if (experts.is_here and is_boundary) or (rows.taps is None and not is_boundary):
                    continue
                _run(run, at, stop.at)
                at = stop.at
                if stop.kind == "experts":
                    if clock is not None:
                        clock.mark()
                    x, chosen = run.values(stop.slots[0]).copy(), run.chosen(stop.slots[1])
                    tickets[stop.slots[2]] = experts.send(stop.layer, x, chosen.ids.copy()), chosen.weights.copy()
                    at += 1
                    if clock is not None:
                        clock.lap("dispatch")
                elif stop.kind == "collect":
                    ticket, weights = tickets.pop(stop.slots[0])
                    yield
                    if clock is not None:
                        clock.mark()
                    came = experts.wait(ticket)
                    if clock is not None:
                        clock.lap("wire", less=experts.busiest_ns, into="experts")
                    run.put(stop.slots[0], _merged(came, weights, stop.layer))
                    if clock is not None:
                        clock.lap("combine")
                elif rows.taps is not None:
                    _tap(rows.taps, stop, run)
            _run(run, at, self._end if len(rows.wanted) else self._head)
            if not len(rows.wanted):
                return np.empty((0, self._vocabulary), np.float32)
            logits = run.values(self._logits).copy()
        finally:
            run.close()
            if clock is not None and ns is not None:
                for part, spent in zip(PARTS, ns.tolist(), strict=True):
                    clock.add(part, spent)
        if not is_finite(logits):
            raise BackboneError("the logits are not finite: the model's weights or its definition are at fault")
        return logits


def _run(run: Run, start: int, stop: int) -> None:
    try:
        run.run(start, stop)
    except NotFinite as error:
        raise BackboneError(f"{error}, and there is nobody else to ask; the request ends") from None


def _tap(taps: Taps, stop: _Stop, run: Run) -> None:
    if stop.kind == "layer":
        taps.residuals.setdefault(stop.layer, []).append(run.values(stop.slots[0]).copy())
    else:
        taps.scores.setdefault(stop.layer, []).append(run.values(stop.slots[0]).copy())
        taps.ids.setdefault(stop.layer, []).append(run.chosen(stop.slots[1]).ids.copy())


def _merged(rows: F32, weights: F32, layer: int) -> F32:
    if not is_finite(rows):
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
