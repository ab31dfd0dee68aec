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
from ..steps import Compiled, compile_program
from .memory import Caches, CacheShape, address, aligned, filled
from .packing import pack
from .structs import CBank, CRun, CStep


class Kernels(Protocol):
    """The loaded library with its threads."""

    def run(self, steps: int, count: int, run: CRun) -> None:
        """Run steps at an address. KernelError when there is no memory."""

    @property
    def quantised_floats(self) -> Callable[[int], int] | None:
        """Floats that so many activations take when they are quantised; None in the F32 class."""

    @property
    def half_cache(self) -> bool:
        """Whether keys and values are kept in F16."""

    def bank_of(self, bank: ExpertBank) -> CBank:
        """What C knows of a bank that this backend loaded."""


class Workspace:
    """Everything that C reads or writes in a run of up to so many rows, at addresses that stay."""

    def __init__(self, compiled: Compiled, rows: int, layers: int) -> None:
        self.rows = rows
        self.buffers: list[F32] = [aligned(rows * width) for width in compiled.buffer_widths]
        self.ids: dict[int, NDArray[np.int32]] = {b: aligned(rows * k, np.int32) for b, k in compiled.chosen.items()}
        self.tokens, self.wanted, self.sequence = (aligned(rows, np.int32) for _ in range(3))
        self.positions = aligned(rows, np.int64)
        self._slots = (ctypes.c_void_p * len(self.buffers))(*[address(b) for b in self.buffers])
        self._ids = (ctypes.c_void_p * len(self.buffers))()
        for buffer, ids in self.ids.items():
            self._ids[buffer] = address(ids)
        self.given = (ctypes.c_void_p * max(1, layers))()
        self.caches = (ctypes.c_void_p * rows)()
        self.expert_space: tuple[NDArray[Any], ...] = ()
        self.expert_sizes = (0, 0, 0, 0)
        self.run = CRun(
            tokens=address(self.tokens),
            positions=address(self.positions),
            wanted=address(self.wanted),
            sequence=address(self.sequence),
            caches=ctypes.addressof(self.caches),
            slots=ctypes.addressof(self._slots),
            ids=ctypes.addressof(self._ids),
        )


class NativeProgram:
    """Operations compiled for the C kernels."""

    def __init__(self, kernels: Kernels, operations: Seq[Operation], slot_widths: Seq[int]) -> None:
        self._kernels = kernels
        self.compiled = compiled = compile_program(operations, len(slot_widths), kernels.quantised_floats)
        self._steps = pack(compiled.steps, half_cache=kernels.half_cache)
        self._address = ctypes.addressof(self._steps)
        shapes = [compiled.caches[memory] for memory in range(len(compiled.caches))]
        self._shapes = [CacheShape(a.kv_heads, filled(a.width), filled(a.value_width)) for a in shapes]
        self._ropes = [(i, step.rope) for i, step in enumerate(compiled.steps) if step.rope is not None]
        self._tables = {id(table): table for _, table in self._ropes}
        self._turned = 0  #: positions for which the tables' addresses are known
        self._layers = 1 + max((operation.layer for operation in operations), default=0)
        self._free: list[Workspace] = []
        self._banks = list[CBank]()
        self._banks_wanted = {i: step.experts for i, step in enumerate(compiled.steps) if step.experts is not None}
        self._most_pairs_a_row, self._hidden, self._outputs, self._experts, self._quantised = 0, 0, 0, 0, 0

    def sequence(self) -> Sequence:
        """A new, empty sequence."""
        return Sequence((Caches(self._shapes, half=self._kernels.half_cache),))

    def begin(self, rows: Rows, ns: NDArray[np.int64] | None = None) -> NativeRun:
        """Start on a batch of rows. ValueError when a row's position does not follow what its sequence holds."""
        self._turn(int(rows.positions.max(initial=-1)) + 1)
        space = next((s for s in self._free if s.rows >= len(rows)), None)
        if space is None:
            self._free.clear()  # too small for this run: never needed again, most likely
            space = Workspace(self.compiled, max(1, len(rows)), self._layers)
        else:
            self._free.remove(space)
        return NativeRun(self, rows, space, ns)

    def give_back(self, space: Workspace) -> None:
        """A run is over."""
        self._free.append(space)

    def _turn(self, positions: int) -> None:
        """Tables of RoPE for so many positions, and their addresses in the steps."""
        if positions <= self._turned:
            return
        for table in self._tables.values():
            table.reserve(positions)
        for step, table in self._ropes:
            self._steps[step].vector, self._steps[step].second = address(table.cos), address(table.sin)
        self._turned = min((len(table.cos) for table in self._tables.values()), default=positions)

    def _load_banks(self, start: int, stop: int) -> None:
        """Banks of the experts that these steps run here."""
        for step in [s for s in self._banks_wanted if start <= s < stop]:
            bank = self._kernels.bank_of(self._banks_wanted.pop(step).constants["bank"]())
            self._banks.append(bank)
            self._steps[step].bank = ctypes.addressof(bank)
            self._most_pairs_a_row = max(self._most_pairs_a_row, self._steps[step].n[0])
            self._hidden = max(self._hidden, -(-bank.hidden // 32) * 32)
            if self._kernels.quantised_floats is not None:
                self._quantised = max(self._quantised, self._kernels.quantised_floats(bank.hidden))
            self._outputs, self._experts = max(self._outputs, bank.outputs), max(self._experts, bank.count)

    def _make_expert_space(self, space: Workspace) -> None:
        """Room for hidden values, rows and the order of one layer's pairs."""
        pairs = space.rows * self._most_pairs_a_row
        sizes = pairs * self._hidden, pairs * self._quantised, pairs * self._outputs, 4 * pairs + 1 + self._experts
        if any(need > have for need, have in zip(sizes, space.expert_sizes, strict=True)):
            space.expert_space = (*(aligned(size) for size in sizes[:3]), aligned(sizes[3], np.int32))
            space.expert_sizes = sizes
            addresses = [address(array) for array in space.expert_space]
            space.run.hidden, space.run.hidden_quantised, space.run.expert_rows, space.run.index = addresses

    def run(self, start: int, stop: int, space: Workspace) -> None:
        """Run operations start to stop."""
        first, end = self.compiled.first_step[start], self.compiled.first_step[stop]
        if first == end:
            return
        if self._banks_wanted:
            self._load_banks(first, end)
        if self._most_pairs_a_row:
            self._make_expert_space(space)
        self._kernels.run(self._address + first * ctypes.sizeof(CStep), end - first, space.run)
        if space.run.bad_layer >= 0:
            raise NotFinite(space.run.bad_layer)


class NativeRun:
    """A batch on its way through a program."""

    def __init__(self, program: NativeProgram, rows: Rows, space: Workspace, ns: NDArray[np.int64] | None) -> None:
        self._program, self._space, self._ns = program, space, ns
        self._at, count = 0, len(rows)
        space.tokens[:count] = rows.tokens
        space.positions[:count] = rows.positions
        space.wanted[: len(rows.wanted)] = rows.wanted
        self._name_sequences(rows, space)
        self._given = {layer: np.ascontiguousarray(ids, np.int32) for layer, ids in (rows.given_ids or {}).items()}
        for layer in range(len(space.given) if self._given else 0):
            space.given[layer] = address(self._given[layer]) if layer in self._given else None
        run = space.run
        run.rows, run.wanted_count = count, len(rows.wanted)
        run.given = ctypes.addressof(space.given) if self._given else None
        run.most_keys = int(rows.positions[0] if count == 1 else rows.positions.max(initial=-1)) + 1
        run.ns = None if ns is None else address(ns)

    @staticmethod
    def _name_sequences(rows: Rows, space: Workspace) -> None:
        """Which row is of which sequence, and where each sequence's keys and values are."""
        first = rows.sequences[0] if rows.sequences else None
        if first is None or all(sequence is first for sequence in rows.sequences):
            space.sequence[: len(rows)] = 0
            if first is not None:
                space.caches[0] = ctypes.addressof(_reserved(first, rows.positions))
            return
        number = {id(sequence): i for i, sequence in enumerate(dict.fromkeys(rows.sequences))}
        of = np.array([number[id(sequence)] for sequence in rows.sequences], np.int32)
        space.sequence[: len(rows)] = of
        for i, sequence in enumerate(dict.fromkeys(rows.sequences)):
            space.caches[i] = ctypes.addressof(_reserved(sequence, rows.positions[of == i]))

    def run(self, start: int, stop: int) -> None:
        """Run operations start to stop. NotFinite when experts' rows are not finite."""
        self._at = stop
        self._program.run(start, stop, self._space)

    def values(self, slot: int) -> F32:
        """What a slot holds, [rows, width]."""
        view, run = self._program.compiled.views[self._at], self._space.run
        rows, width = run.wanted_count if slot in view.lasts else run.rows, view.widths[slot]
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


def _reserved(sequence: Sequence, positions: NDArray[np.int64]) -> Any:
    """The table of a sequence's caches, with room for these positions."""
    first, count = int(positions[0]), len(positions)
    if count > 1 and not np.array_equal(positions, np.arange(first, first + count)):
        raise ValueError("rows of one sequence have to be in order of position, without a gap")
    caches = sequence.memories[0]
    if not isinstance(caches, Caches):
        raise TypeError(f"a sequence of another backend: {type(caches).__name__}")
    caches.reserve(first, first + count)
    return caches.table
