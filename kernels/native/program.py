"""A bound program on the C kernels: one call runs everything between two boundaries.

Legend: T rows. A slot's values are [T, width] in a buffer of the run's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import NotFinite
from ..interface import F32, ExpertBank, Operation
from ..state import Chosen, Rows, Sequence
from .compiler import Compiled, compile_program
from .memory import Caches, aligned
from .structs import CBank, CRun, CStep

ADDRESS = ctypes.sizeof(ctypes.c_void_p)


class Kernels(Protocol):
    """The loaded library with its threads."""

    def run(self, steps: int, count: int, run: CRun, more: bool) -> None:
        """Run steps at an address. KernelError when there is no memory."""

    @property
    def quantised_floats(self) -> Callable[[int], int] | None:
        """Floats that so many activations take when they are quantised; None in the F32 class."""

    def bank_of(self, bank: ExpertBank) -> CBank:
        """What C knows of a bank that this backend loaded."""


class Workspace:
    """Buffers for a program's slots, for up to so many rows."""

    def __init__(self, compiled: Compiled, rows: int) -> None:
        self.rows = rows
        self.buffers: list[F32] = [aligned(rows * width) for width in compiled.buffer_widths]
        self.slots = (ctypes.c_void_p * len(self.buffers))(*[b.ctypes.data for b in self.buffers])
        self.ids: dict[int, NDArray[np.int32]] = {b: aligned(rows * k, np.int32) for b, k in compiled.chosen.items()}
        self.id_table = (ctypes.c_void_p * len(self.buffers))()
        for buffer, ids in self.ids.items():
            self.id_table[buffer] = ids.ctypes.data
        self.expert_space: tuple[NDArray[Any], ...] = ()
        self.expert_sizes = (0, 0, 0, 0)


class NativeProgram:
    """Operations compiled for the C kernels."""

    def __init__(self, kernels: Kernels, operations: Seq[Operation], slot_widths: Seq[int]) -> None:
        self._kernels = kernels
        self.compiled = compiled = compile_program(operations, len(slot_widths), kernels.quantised_floats)
        self._steps = (CStep * max(1, len(compiled.steps)))(*compiled.steps)
        self._address = ctypes.addressof(self._steps)
        self._shapes = [compiled.caches[memory] for memory in range(len(compiled.caches))]
        self._tables = {id(table): table for _, table in compiled.ropes}
        self._turned = 0  #: positions for which the tables' addresses are known
        self.layers = 1 + max((operation.layer for operation in operations), default=0)
        self._free: list[Workspace] = []
        self._expert_steps = {step for step, _ in compiled.experts}
        self._banks_wanted = dict(compiled.experts)
        self._most_pairs_a_row, self._hidden, self._outputs, self._experts, self._quantised = 0, 0, 0, 0, 0
        self.clock: NDArray[np.int64] | None = None  #: nanoseconds by part of PARTS, where they are wanted

    def sequence(self) -> Sequence:
        """A new, empty sequence."""
        return Sequence((Caches(self._shapes),))

    def begin(self, rows: Rows) -> NativeRun:
        """Start on a batch of rows. ValueError when a row's position does not follow what its sequence holds."""
        self._turn(int(rows.positions.max(initial=-1)) + 1)
        space = next((s for s in self._free if s.rows >= len(rows)), None)
        if space is None:
            self._free.clear()  # too small for this run: never needed again, most likely
            space = Workspace(self.compiled, len(rows))
        else:
            self._free.remove(space)
        return NativeRun(self, rows, space)

    def give_back(self, space: Workspace) -> None:
        """A run is over."""
        self._free.append(space)

    def _turn(self, positions: int) -> None:
        """Tables of RoPE for so many positions, and their addresses in the steps."""
        if positions <= self._turned:
            return
        for table in self._tables.values():
            table.reserve(positions)
        for step, table in self.compiled.ropes:
            self._steps[step].vector, self._steps[step].second = table.cos.ctypes.data, table.sin.ctypes.data
        self._turned = min((len(table.cos) for table in self._tables.values()), default=positions)

    def _load_banks(self, start: int, stop: int) -> None:
        """Banks of the experts that these steps run here."""
        for step in [s for s in self._banks_wanted if start <= s < stop]:
            bank = self._kernels.bank_of(self._banks_wanted.pop(step).constants["bank"]())
            self.compiled.kept.append(bank)
            self._steps[step].bank = ctypes.addressof(bank)
            self._most_pairs_a_row = max(self._most_pairs_a_row, self._steps[step].n[0])
            self._hidden = max(self._hidden, -(-bank.hidden // 32) * 32)
            if self._kernels.quantised_floats is not None:
                self._quantised = max(self._quantised, self._kernels.quantised_floats(bank.hidden))
            self._outputs, self._experts = max(self._outputs, bank.outputs), max(self._experts, bank.count)

    def expert_space(self, space: Workspace, rows: int) -> tuple[NDArray[Any], ...]:
        """Room for hidden values, rows and the order of one layer's pairs."""
        pairs = rows * self._most_pairs_a_row
        sizes = pairs * self._hidden, pairs * self._quantised, pairs * self._outputs, 4 * pairs + 1 + self._experts
        if any(need > have for need, have in zip(sizes, space.expert_sizes, strict=True)):
            space.expert_space = (*(aligned(size) for size in sizes[:3]), aligned(sizes[3], np.int32))
            space.expert_sizes = sizes
        return space.expert_space

    def run(self, start: int, stop: int, space: Workspace, run: CRun, more: bool) -> None:
        """Run operations start to stop."""
        first, end = self.compiled.first_step[start], self.compiled.first_step[stop]
        if first == end:
            return
        if self._banks_wanted:
            self._load_banks(first, end)
        if self._most_pairs_a_row:
            addresses = [array.ctypes.data for array in self.expert_space(space, run.rows)]
            run.hidden, run.hidden_quantised, run.expert_rows, run.index = addresses
        run.ns = None if self.clock is None else self.clock.ctypes.data
        self._kernels.run(self._address + first * ctypes.sizeof(CStep), end - first, run, more)
        if run.bad_layer >= 0:
            raise NotFinite(run.bad_layer)


class NativeRun:
    """A batch on its way through a program."""

    def __init__(self, program: NativeProgram, rows: Rows, space: Workspace) -> None:
        self._program, self._rows, self._space = program, rows, space
        self._at = 0
        sequences = list({id(sequence): sequence for sequence in rows.sequences}.values())
        number = {id(sequence): i for i, sequence in enumerate(sequences)}
        self._tokens = np.ascontiguousarray(rows.tokens, np.int32)
        self._positions = np.ascontiguousarray(rows.positions, np.int64)
        self._wanted = rows.wanted.astype(np.int32)
        if len(sequences) == 1:
            self._of = np.zeros(len(rows), np.int32)
        else:
            self._of = np.array([number[id(sequence)] for sequence in rows.sequences], np.int32)
        self._tables = (ctypes.c_void_p * max(1, len(sequences)))()
        for i, sequence in enumerate(sequences):
            self._tables[i] = ctypes.addressof(self._reserved(i, sequence))
        # Of this run alone: another run's rows are not as many, and it may give other layers' ids.
        self._given = {layer: np.ascontiguousarray(ids, np.int32) for layer, ids in (rows.given_ids or {}).items()}
        given = (ctypes.c_void_p * program.layers)()
        for layer, ids in self._given.items():
            given[layer] = ids.ctypes.data
        self._given_table = given
        self._run = CRun(
            rows=len(rows),
            wanted_count=len(rows.wanted),
            tokens=self._tokens.ctypes.data,
            positions=self._positions.ctypes.data,
            wanted=self._wanted.ctypes.data,
            sequence=self._of.ctypes.data,
            caches=ctypes.addressof(self._tables),
            slots=ctypes.addressof(space.slots),
            ids=ctypes.addressof(space.id_table),
            given=ctypes.addressof(given) if rows.given_ids else None,
            most_keys=int(self._positions.max(initial=-1)) + 1,
        )

    def _reserved(self, i: int, sequence: Sequence) -> Any:
        positions = self._positions if len(self._tables) == 1 else self._positions[self._of == i]
        first, length = int(positions[0]), len(positions)
        if not np.array_equal(positions, np.arange(first, first + length)):
            raise ValueError("rows of one sequence have to be in order of position, without a gap")
        caches = sequence.memories[0]
        if not isinstance(caches, Caches):
            raise TypeError(f"a sequence of another backend: {type(caches).__name__}")
        caches.reserve(first, first + length)
        return caches.table

    def run(self, start: int, stop: int, *, more: bool = False) -> None:
        """Run operations start to stop. NotFinite when experts' rows are not finite."""
        self._at = stop
        self._program.run(start, stop, self._space, self._run, more)

    def values(self, slot: int) -> F32:
        """What a slot holds, [rows, width]."""
        view = self._program.compiled.views[self._at]
        rows, width = self._run.wanted_count if slot in view.lasts else self._run.rows, view.widths[slot]
        return self._space.buffers[view.buffers[slot]][: rows * width].reshape(rows, width)

    def chosen(self, slot: int) -> Chosen:
        """What top_k left in a slot."""
        weights = self.values(slot)
        ids = self._space.ids[self._program.compiled.views[self._at].buffers[slot]]
        return Chosen(ids[: weights.size].reshape(weights.shape), weights)

    def put(self, slot: int, values: F32) -> None:
        """Fill a slot."""
        buffer = self._program.compiled.views[self._at].buffers[slot]
        self._space.buffers[buffer][: values.size] = values.reshape(-1)

    def close(self) -> None:
        """Let go of the slots."""
        self._program.give_back(self._space)
