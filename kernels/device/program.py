"""A bound program on a device: a launch or two for each step; the host chooses experts and holds nothing else.

Legend: T rows. A slot's values are [T, width] in a buffer of the run's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..combine import pairs_of
from ..errors import NotFinite
from ..interface import F32, Operation
from ..matrix import Matrix
from ..parts import PARTS
from ..rope import RopeTable
from ..state import Chosen, Rows, Sequence
from ..steps import Step, compile_program
from .bank import DeviceBank
from .caches import DeviceCaches
from .interface import Buffer
from .kernels import ELEMENTWISE, Kernels, Matrices
from .room import Room

T = TypeVar("T")
SCORE_BYTES = 1 << 25  #: of attention's scores at once: so many rows go in one launch


class Workspace:
    """What a run of up to so many rows needs for itself: several runs may be on their way at once."""

    def __init__(self, kernels: Kernels, widths: Seq[int], rows: int) -> None:
        self.rows = rows
        self.buffers = [kernels.device.alloc(max(16, 4 * rows * width)) for width in widths]
        self.tokens, self.wanted, self.positions, self.wanted_positions = (
            kernels.device.alloc(4 * rows) for _ in range(4)
        )


class DeviceProgram:
    """Operations with their tensors on the device."""

    def __init__(self, kernels: Kernels, room: Room, operations: Seq[Operation], slot_widths: Seq[int]) -> None:
        self.kernels, self.room = kernels, room
        self.compiled = compile_program(operations, len(slot_widths))
        self._shapes = [self.compiled.caches[memory] for memory in range(len(self.compiled.caches))]
        self._matrices: dict[int, Matrices] = {}  #: by the address of their bytes: tensors that are used twice
        self._vectors: dict[int, Buffer] = {}
        self._turned: dict[int, tuple[int, tuple[Buffer, Buffer]]] = {}
        self._banks: dict[int, Any] = {}
        self._free = list[Workspace]()
        for step in self.compiled.steps:
            if step.matrix is not None:
                self.matrix(step.matrix)

    def sequence(self) -> Sequence:
        """A new, empty sequence."""
        return Sequence((DeviceCaches(self.kernels, self._shapes),))

    def begin(self, rows: Rows, ns: NDArray[np.int64] | None = None) -> DeviceRun:
        """Start on a batch of rows. ValueError when a row's position does not follow what its sequence holds."""
        return DeviceRun(self, rows, ns)

    def workspace(self, rows: int) -> Workspace:
        """A workspace for so many rows."""
        found = next((space for space in self._free if space.rows >= rows), None)
        if found is None:
            self._free.clear()  # too small for this run: never needed again, most likely
            return Workspace(self.kernels, self.compiled.buffer_widths, rows)
        self._free.remove(found)
        return found

    def give_back(self, space: Workspace) -> None:
        """A run is over."""
        self._free.append(space)

    # ---- what is on the device, once

    def matrix(self, matrix: Matrix) -> Matrices:
        """A matrix of the model."""
        key: int = matrix.data.ctypes.data
        if key not in self._matrices:
            data = self.kernels.upload(matrix.data)
            self._matrices[key] = Matrices(matrix.type, matrix.rows, matrix.cols, data)
        return self._matrices[key]

    def vector(self, vector: F32) -> Buffer:
        """A norm's weights, a bias, sinks. The step that it belongs to keeps it alive."""
        if id(vector) not in self._vectors:
            self._vectors[id(vector)] = self.kernels.upload(vector)
        return self._vectors[id(vector)]

    def turns(self, table: RopeTable, positions: int) -> tuple[Buffer, Buffer]:
        """cos and sin of RoPE for so many positions."""
        have, buffers = self._turned.get(id(table), (0, (None, None)))
        if have < positions:
            table.reserve(positions)
            buffers = self.kernels.upload(table.cos), self.kernels.upload(table.sin)
            self._turned[id(table)] = len(table.cos), buffers
        return buffers

    def bank(self, step: Step) -> Any:
        """A layer's experts: on this device, or with whoever has them in their place."""
        if step.layer not in self._banks and step.experts is not None:
            self._banks[step.layer] = step.experts.constants["bank"]()
        return self._banks[step.layer]


class DeviceRun:
    """A batch on its way through a program."""

    def __init__(self, program: DeviceProgram, rows: Rows, ns: NDArray[np.int64] | None) -> None:
        self._program, self._kernels, self._room = program, program.kernels, program.room
        self._rows, self._ns, self._at = rows, ns, 0
        self._runs = _reserve(rows)
        self._chosen: dict[int, NDArray[np.int32]] = {}  #: ids by buffer
        self._space = program.workspace(max(1, len(rows)))
        self._buffers, space = self._space.buffers, self._space
        for buffer, values in (
            (space.tokens, rows.tokens),
            (space.wanted, rows.wanted),
            (space.positions, rows.positions),
            (space.wanted_positions, rows.positions[rows.wanted]),
        ):
            self._kernels.device.write(buffer, values.astype(np.int32))

    # ---- Run

    def run(self, start: int, stop: int) -> None:
        """Run operations start to stop. NotFinite when experts' rows are not finite."""
        self._at = stop
        first_step = self._program.compiled.first_step
        for step in self._program.compiled.steps[first_step[start] : first_step[stop]]:
            if not (len(self._rows.wanted) if step.is_last else len(self._rows)):
                continue
            started = perf_counter_ns()
            _STEPS.get(step.op, DeviceRun._elementwise)(self, step)
            if self._ns is not None:
                self._kernels.device.wait()
                self._ns[step.part] += perf_counter_ns() - started

    def values(self, slot: int) -> F32:
        """What a slot holds, [rows, width], read from the device."""
        view = self._program.compiled.views[self._at]
        out = np.empty((self._count(slot in view.lasts), view.widths[slot]), np.float32)
        self._kernels.device.read(self._buffers[view.buffers[slot]], out)
        return out

    def chosen(self, slot: int) -> Chosen:
        """What top_k left in a slot."""
        return Chosen(self._chosen[self._program.compiled.views[self._at].buffers[slot]], self.values(slot))

    def put(self, slot: int, values: F32) -> None:
        """Fill a slot."""
        buffer = self._buffers[self._program.compiled.views[self._at].buffers[slot]]
        self._kernels.device.write(buffer, np.ascontiguousarray(values, np.float32))

    def close(self) -> None:
        """Let go of the slots."""
        self._program.give_back(self._space)

    # ---- steps

    def _count(self, is_last: bool) -> int:
        return len(self._rows.wanted) if is_last else len(self._rows)

    def _input(self, step: Step, i: int = 0) -> Buffer:
        return self._buffers[step.inputs[i]]

    def _elementwise(self, step: Step) -> None:
        x, count, options = self._input(step), self._count(step.is_last), dict[str, Any]()
        if step.op == "mul":
            options = {"y": self._input(step, 1), "y_width": step.n[0]}
        elif step.op == "add":
            options = {"y": self._input(step, 1)}
        elif step.op == "add_bias" and step.vector is not None:
            options = {"y": self._program.vector(step.vector), "one_y": True}
        assert step.op in ELEMENTWISE, step.op  # noqa: S101 - a step that nobody wrote a kernel for
        out = self._buffers[step.out]
        self._kernels.elementwise(step.op, out, x, count, step.width, f=step.f, **options)

    def _embed(self, step: Step) -> None:
        matrix = self._program.matrix(_the(step.matrix))
        self._kernels.embed(matrix, self._space.tokens, self._buffers[step.out], len(self._rows))

    def _rms_norm(self, step: Step) -> None:
        heads = step.n[0] if step.op == "norm_heads" else 1
        weight, rows = self._program.vector(_the(step.vector)), self._count(step.is_last) * heads
        self._kernels.rms_norm(self._buffers[step.out], self._input(step), weight, rows, step.width // heads, step.f)

    def _rope(self, step: Step) -> None:
        heads, turned = step.n
        positions = self._space.wanted_positions if step.is_last else self._space.positions
        tables = self._program.turns(_the(step.rope), int(self._rows.positions.max()) + 1)
        shape = self._count(step.is_last), heads, step.width // heads, turned
        self._kernels.rope(self._input(step), positions, tables, *shape, neighbours=step.op == "rope_pairs")

    def _softmax(self, step: Step) -> None:
        self._kernels.softmax(self._input(step), self._count(step.is_last), step.width)

    def _normalize(self, step: Step) -> None:
        self._kernels.normalize(self._input(step), self._count(step.is_last), step.width)

    def _take(self, step: Step) -> None:
        out, x = self._buffers[step.out], self._input(step)
        self._kernels.split(out, x, self._count(step.is_last), *step.n)

    def _last(self, step: Step) -> None:
        out, count = self._buffers[step.out], len(self._rows.wanted)
        self._kernels.pick_rows(out, self._input(step), self._space.wanted, count, step.width)

    def _matmul(self, step: Step) -> None:
        matrix, count = self._program.matrix(_the(step.matrix)), self._count(step.is_last)
        work = self._kernels.plain_work(count)
        self._kernels.products(matrix, self._input(step), self._buffers[step.out], work)

    def _append(self, step: Step) -> None:
        a = _the(step.attention)
        k, v = self._input(step, 0), self._input(step, 1)
        for caches, first, position, count in self._runs:
            numbers = first, position, a.kv_heads, a.width, a.value_width, caches.capacity
            self._kernels.append(*caches.of(step.memory), k, v, count, *numbers)

    def _attention(self, step: Step) -> None:
        a = _the(step.attention)
        sinks = None if a.sinks is None else self._program.vector(a.sinks)
        out, q = self._buffers[step.out], self._input(step)
        for caches, first, position, count in self._runs:
            room = -(-(position + count) // 32) * 32
            at_once = max(1, SCORE_BYTES // (4 * a.heads * room))
            for start in range(0, count, at_once):
                some = min(at_once, count - start)
                scores = self._room.of("scores", 4 * some * a.heads * room)
                numbers = (
                    *(first + start, position + start, a.heads, a.kv_heads, a.width, a.value_width),
                    *(caches.capacity, room, a.window),
                )
                cache = caches.of(step.memory)
                self._kernels.attention(out, q, cache, scores, sinks, some, numbers, a.scale, a.softcap)

    def _top_k(self, step: Step) -> None:
        count, device = self._count(step.is_last), self._kernels.device
        scores = np.empty((count, step.width), np.float32)
        device.read(self._input(step), scores)
        weights = None
        if step.inputs[1] >= 0:
            weights = np.empty_like(scores)
            device.read(self._input(step, 1), weights)
        chosen = reference.top_k(scores, weights, count=step.out_width, rows=self._rows, layer=step.layer)
        self._chosen[step.out] = np.ascontiguousarray(chosen.ids, np.int32)
        device.write(self._buffers[step.out], np.ascontiguousarray(chosen.weights))

    def _experts(self, step: Step) -> None:
        bank, kernels = self._program.bank(step), self._kernels
        ids = self._chosen[step.inputs[1]]
        count, chosen = ids.shape
        pairs = pairs_of(ids)
        rows = self._room.of("experts", 4 * len(pairs) * step.out_width)
        started = perf_counter_ns()
        if isinstance(bank, DeviceBank):
            bank.compute(self._input(step), pairs, rows)
        else:
            x = np.empty((count, step.width), np.float32)
            kernels.device.read(self._input(step), x)
            kernels.device.write(rows, np.ascontiguousarray(bank.rows(x, pairs)))
        if self._ns is not None:
            kernels.device.wait()
            spent = perf_counter_ns() - started
            self._ns[step.part] += spent
            self._ns[PARTS.index("combine")] -= spent
        out, bad = self._buffers[step.out], self._room.of("bad", 4 * count)
        kernels.merge(out, rows, self._input(step, 1), count, chosen, step.out_width)
        kernels.look_for_bad(bad, out, count, step.out_width)
        found = np.empty(count, np.int32)
        kernels.device.read(bad, found)
        if found.any():
            raise NotFinite(step.layer)


_STEPS: Mapping[str, Callable[[DeviceRun, Step], None]] = {
    "embed": DeviceRun._embed,
    "rms_norm": DeviceRun._rms_norm,
    "norm_heads": DeviceRun._rms_norm,
    "rope": DeviceRun._rope,
    "rope_pairs": DeviceRun._rope,
    "softmax": DeviceRun._softmax,
    "normalize": DeviceRun._normalize,
    "take": DeviceRun._take,
    "last": DeviceRun._last,
    "matmul": DeviceRun._matmul,
    "append": DeviceRun._append,
    "attention": DeviceRun._attention,
    "top_k": DeviceRun._top_k,
    "experts": DeviceRun._experts,
}


def _the(value: T | None) -> T:
    """What a step of this kind has."""
    if value is None:
        raise TypeError("a step without what its operation needs")
    return value


def _reserve(rows: Rows) -> list[tuple[DeviceCaches, int, int, int]]:
    """Rows that follow one another in one sequence, as (its caches, first row, its position, rows), with room made.

    ValueError when a row's position does not follow what its sequence holds.
    """
    found = list[tuple[DeviceCaches, int, int, int]]()
    for row, (sequence, position) in enumerate(zip(rows.sequences, rows.positions.tolist(), strict=True)):
        caches = sequence.memories[0]
        if not isinstance(caches, DeviceCaches):
            raise TypeError(f"a sequence of another backend: {type(caches).__name__}")
        caches.reserve(position, position + 1)
        if found and found[-1][0] is caches:
            _, first, start, count = found[-1]
            found[-1] = caches, first, start, count + 1
        else:
            found.append((caches, row, position, 1))
    return found
