"""Launches by name, on one device: programs built when they are first needed, tables of who is multiplied by what.

Legend: n rows of x, P pairs of (row, expert), K inputs, R outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import GGMLType, row_bytes
from . import sources
from .interface import Buffer, Device, Module
from .room import Room

ROW_ITEMS, WIDE_ITEMS = 32, 64  #: of a group, as the source has it
TEAMS = 8  #: rows of weights that a group of products works on at once
LANES = 32  #: of a product
I32 = NDArray[np.int32]

#: Elementwise operations by their number in the source.
ELEMENTWISE = {
    name: number
    for number, name in enumerate("copy add mul scale softcap add_bias sigmoid silu gelu gelu_tanh relu gate".split())
}


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """Matrices of one shape and type behind one another in a buffer; `bias` likewise, [matrices, rows] float32."""

    type: GGMLType
    rows: int
    cols: int
    data: Buffer
    bias: Buffer | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a quantised row."""
        return row_bytes(self.type, self.cols)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Which rows are multiplied by which matrix, as the device reads it."""

    table: Buffer
    chunks: int
    members: int
    rows: int  #: of x, up to the last one that is read
    is_wide: bool


def _whole(count: int, size: int) -> int:
    return -(-count // size)


def _int(*values: int) -> list[np.int32]:
    return [np.int32(value) for value in values]


class Kernels:
    """The device source on a device. Buffers hold float32 unless something else is said."""

    def __init__(self, device: Device, accumulation: str = "f32") -> None:
        """`accumulation`: dtype in which products are summed, "f32" or "f16"."""
        self.device, self._accumulation = device, accumulation
        self._rounded = Room(device)
        self._modules: dict[str, Module] = {}
        self.warm: set[tuple[GGMLType, ...]] = set()  #: types of experts that were computed with already
        self._plain: dict[int, Work] = {}  #: rows in their order, by one matrix
        self._nothing = device.alloc(16)  #: in place of a buffer that a kernel will not look at

    def _module(self, program: sources.Program) -> Module:
        if program.name not in self._modules:
            self._modules[program.name] = self.device.build(program.source, program.defines)
        return self._modules[program.name]

    def _dense(self, kernel: str, groups: tuple[int, int], items: int, *args: Any) -> None:
        self.device.launch(self._module(sources.dense()), kernel, groups, items, args)

    def upload(self, array: NDArray[Any]) -> Buffer:
        """A buffer with a copy of an array."""
        data = np.ascontiguousarray(array)
        buffer = self.device.alloc(max(16, data.nbytes))
        self.device.write(buffer, data)
        return buffer

    # ---- products

    def plain_work(self, rows: int) -> Work:
        """Rows 0 to rows - 1 of x to the same rows of y, by the first matrix."""
        if rows not in self._plain:
            if len(self._plain) >= 64:
                self._plain.clear()
            order = np.arange(rows, dtype=np.int32)
            self._plain[rows] = self.work([(0, rows)], order, order)
        return self._plain[rows]

    def work(self, groups: Sequence[tuple[int, int]], reads: I32, writes: I32) -> Work:
        """Groups of (matrix, members), one after the other: member i reads row reads[i] and writes row writes[i]."""
        is_wide = any(count > 1 for _, count in groups)
        most, first, chunks = sources.WIDE[1] if is_wide else 1, 0, list[int]()
        for matrix, count in groups:
            for at in range(0, count, most):
                chunks += [matrix, first + at, min(most, count - at)]
            first += count
        table = np.concatenate([np.array(chunks, np.int32), reads, writes]).astype(np.int32)
        return Work(self.upload(table), len(chunks) // 3, len(reads), int(reads.max(initial=-1)) + 1, is_wide)

    def _products_module(self, type: GGMLType, work: Work) -> tuple[Module, int]:  # noqa: A002
        rows, columns = sources.WIDE if work.is_wide else sources.NARROW
        return self._module(sources.products(type, rows, columns, self._accumulation)), rows

    def _multiplied(self, module: Module, x: Buffer, cols: int, work: Work) -> tuple[Buffer, int]:
        """Rows of x as products read them, and from one to the next how many words."""
        if self._accumulation == "f32":
            return x, cols
        stride = _whole(cols, LANES) * LANES // 2 + 4  # two values a word; behind them the row's scale
        rounded = self._rounded.of("x", 4 * stride * work.rows)
        self.device.launch(module, "round_rows", (work.rows, 1), WIDE_ITEMS, [x, rounded, *_int(cols, stride)])
        return rounded, stride

    def products(self, m: Matrices, x: Buffer, y: Buffer, work: Work) -> None:
        """Products of rows of x [.., K] by matrices, with bias where there is one, into rows of y [.., R]."""
        module, rows = self._products_module(m.type, work)
        bias = self._nothing if m.bias is None else m.bias
        x, stride = self._multiplied(module, x, m.cols, work)
        numbers = _int(work.chunks, work.members, m.rows, m.cols, m.row_bytes, stride, m.rows, m.bias is not None)
        groups = _whole(m.rows, TEAMS * rows), work.chunks
        self.device.launch(module, "products", groups, WIDE_ITEMS, [m.data, x, bias, y, work.table, *numbers])

    def gated(self, gate: Matrices, up: Matrices, activation: int, x: Buffer, y: Buffer, work: Work) -> None:
        """activation(gate x) * (up x) for rows of x [.., K] into rows of y [.., R]; both matrices are of one type."""
        module, _ = self._products_module(gate.type, work)
        biases = [self._nothing if m.bias is None else m.bias for m in (gate, up)]
        x, stride = self._multiplied(module, x, gate.cols, work)
        numbers = _int(
            *(work.chunks, work.members, gate.rows, gate.cols, gate.row_bytes, stride, gate.rows),
            *(gate.bias is not None, up.bias is not None, activation),
        )
        groups = _whole(gate.rows, TEAMS), work.chunks
        args = [gate.data, up.data, x, *biases, y, work.table, *numbers]
        self.device.launch(module, "gated", groups, WIDE_ITEMS, args)

    def embed(self, m: Matrices, tokens: Buffer, out: Buffer, rows: int) -> None:
        """Rows `tokens` [rows] int32 of a matrix as float32 into out [rows, K]."""
        module = self._module(sources.products(m.type, *sources.NARROW, self._accumulation))
        groups = _whole(m.cols, 4 * WIDE_ITEMS), rows
        self.device.launch(module, "embed", groups, WIDE_ITEMS, [m.data, tokens, out, *_int(m.cols, m.row_bytes)])

    # ---- the rest of the dense path; shapes as in the source

    def elementwise(
        self,
        name: str,
        out: Buffer,
        x: Buffer,
        rows: int,
        width: int,
        *,
        y: Buffer | None = None,
        y_width: int = 0,
        one_y: bool = False,
        f: float = 0.0,
        activation: int = 0,
    ) -> None:
        """out = f(x, y), [rows, width]; y [rows, y_width], or one row for all."""
        self._dense(
            *("elementwise", (_whole(width, WIDE_ITEMS), rows), WIDE_ITEMS),
            *(out, x, self._nothing if y is None else y),
            *_int(ELEMENTWISE[name], width, y_width or width, one_y),
            *(np.float32(f), np.int32(activation)),
        )

    def split(self, out: Buffer, x: Buffer, rows: int, heads: int, head_width: int, start: int, taken: int) -> None:
        """Values start to start + taken of each head."""
        groups = _whole(heads * taken, WIDE_ITEMS), rows
        self._dense("split", groups, WIDE_ITEMS, out, x, *_int(heads, head_width, start, taken))

    def pick_rows(self, out: Buffer, x: Buffer, wanted: Buffer, rows: int, width: int) -> None:
        """Rows `wanted` [rows] int32 of x."""
        self._dense("pick_rows", (_whole(width, WIDE_ITEMS), rows), WIDE_ITEMS, out, x, wanted, *_int(width))

    def rope(
        self,
        x: Buffer,
        positions: Buffer,
        tables: tuple[Buffer, Buffer],
        rows: int,
        heads: int,
        head_width: int,
        turned: int,
        *,
        neighbours: bool,
    ) -> None:
        """Turn x [rows, heads, head_width] in place by cos and sin [positions, turned / 2]."""
        groups = _whole(heads * turned // 2, WIDE_ITEMS), rows
        self._dense("rope", groups, WIDE_ITEMS, x, positions, *tables, *_int(heads, head_width, turned, neighbours))

    def rms_norm(self, out: Buffer, x: Buffer, weight: Buffer, rows: int, width: int, eps: float) -> None:
        """Each row by its root mean square, times weight [width]."""
        self._dense("rms_norm", (rows, 1), ROW_ITEMS, out, x, weight, np.int32(width), np.float32(eps))

    def softmax(self, x: Buffer, rows: int, width: int) -> None:
        """Each row in place."""
        self._dense("softmax", (rows, 1), ROW_ITEMS, x, np.int32(width))

    def normalize(self, w: Buffer, rows: int, width: int) -> None:
        """Each row in place by its sum."""
        self._dense("normalize_rows", (_whole(rows, WIDE_ITEMS), 1), WIDE_ITEMS, w, *_int(rows, width))

    def append(self, keys: Buffer, values: Buffer, k: Buffer, v: Buffer, rows: int, *numbers: int) -> None:
        """Keep rows of k and v. Numbers: first row, its position, kv heads, key width, value width, capacity."""
        _, _, kv_heads, width, value_width, _ = numbers
        groups = _whole(kv_heads * max(width, value_width), WIDE_ITEMS), rows
        self._dense("append", groups, WIDE_ITEMS, keys, values, k, v, *_int(*numbers))

    def regrow(self, to: Buffer, source: Buffer, kv_heads: int, count: int, to_stride: int, source_stride: int) -> None:
        """Move `count` values of each kv head to a greater room."""
        groups = _whole(count, WIDE_ITEMS), kv_heads
        self._dense("regrow", groups, WIDE_ITEMS, to, source, *_int(count, to_stride, source_stride))

    def attention(
        self,
        out: Buffer,
        q: Buffer,
        cache: tuple[Buffer, Buffer],
        scores: Buffer,
        sinks: Buffer | None,
        rows: int,
        numbers: Sequence[int],
        scale: float,
        softcap: float,
    ) -> None:
        """Numbers: first row, its position, heads, kv heads, key width, value width, capacity, room a row, window."""
        sink = self._nothing if sinks is None else sinks
        numbers = [*numbers, sinks is not None]
        floats = np.float32(scale), np.float32(softcap)
        groups = numbers[2], rows
        self._dense("attention", groups, WIDE_ITEMS, out, q, *cache, scores, sink, *_int(*numbers), *floats)

    def merge(self, out: Buffer, rows: Buffer, weights: Buffer, count: int, chosen: int, width: int) -> None:
        """Rows [count, chosen, width] by weights [count, chosen] into out [count, width]."""
        groups = _whole(width, WIDE_ITEMS), count
        self._dense("merge", groups, WIDE_ITEMS, out, rows, weights, *_int(chosen, width))

    def look_for_bad(self, bad: Buffer, x: Buffer, rows: int, width: int) -> None:
        """bad [rows] int32: whether a row holds what is no finite number."""
        self._dense("look_for_bad", (rows, 1), ROW_ITEMS, bad, x, np.int32(width))
