"""Operations of a program as flat steps: buffers for slots, tensors and numbers at hand. What compiled backends run.

A step names everything that it needs; where that lies (in this machine's memory, on a device) is the backend's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .formats import GGMLType
from .interface import F32, Operation
from .matrix import Matrix
from .parts import parts
from .reference import PREPARED
from .rope import RopeTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Of an attention step: shapes and numbers. A window of 0 is none, a softcap of 0 likewise."""

    heads: int
    kv_heads: int
    width: int  #: values of a query and of a key
    value_width: int
    window: int
    scale: float
    softcap: float
    sinks: F32 | None  # [heads]


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One step on buffers. What `n` holds is said where a step is made."""

    op: str
    layer: int
    memory: int  #: which of a sequence's memories it owns, or -1
    part: int  #: what its time is charged to
    inputs: tuple[int, ...]  #: buffers; -1 for none. In the i16 class the last input of a product is its x, quantised
    out: int  #: likewise
    width: int = 0  #: of the first input; for top_k of the scores
    out_width: int = 0
    is_last: bool = False  #: its rows are those whose logits are wanted
    n: tuple[int, ...] = ()
    f: float = 0.0
    vector: F32 | None = None  #: weights of a norm, a bias
    rope: RopeTable | None = None
    matrix: Matrix | None = None
    attention: Attention | None = None
    experts: Operation | None = None  #: gives the layer's bank


@dataclass(frozen=True, slots=True)
class View:
    """Where slots are at some point of the program: buffer, width, and whether a slot holds wanted rows only."""

    buffers: Mapping[int, int]
    widths: Mapping[int, int]
    lasts: frozenset[int]


@dataclass(slots=True)
class Compiled:
    """Steps and what they need beside them."""

    steps: list[Step] = field(default_factory=list)
    first_step: list[int] = field(default_factory=list)  #: of each operation, and one more for the end
    views: list[View] = field(default_factory=list)  #: before each operation, and at the end
    buffer_widths: list[int] = field(default_factory=list)
    chosen: dict[int, int] = field(default_factory=dict)  #: buffers that top_k fills, with ids a row
    caches: dict[int, Attention] = field(default_factory=dict)  #: by memory


def compile_program(
    operations: Seq[Operation],
    slots: int,
    quantised_floats: Callable[[int], int] | None = None,
) -> Compiled:
    """Walk the operations once, in order. `quantised_floats` makes products of the i16 class."""
    compiler = _Compiler(slots, quantised_floats)
    for operation, part in zip(operations, parts(operations), strict=True):
        compiler.note()
        compiler.operation, compiler.part = operation, part
        _COMPILE.get(operation.name, _Compiler.plain)(compiler, operation)
    compiler.note()
    return compiler.result


class _Compiler:
    operation: Operation
    part: int

    def __init__(self, slots: int, quantised_floats: Callable[[int], int] | None) -> None:
        self._quantised_floats = quantised_floats
        self._quantised_in: dict[int, int] = {}  #: buffer to the one for its quantised rows
        self._is_quantised: set[int] = set()  #: buffers whose quantised rows are those of what they hold
        self.result = Compiled(buffer_widths=[0] * slots)
        self._buffer = {slot: slot for slot in range(slots)}
        self._spare: list[int] = []
        self._width: dict[int, int] = {}
        self._lasts: set[int] = set()
        self._tables: dict[tuple[Any, ...], RopeTable] = {}

    def note(self) -> None:
        """An operation begins."""
        self.result.first_step.append(len(self.result.steps))
        self.result.views.append(View(dict(self._buffer), dict(self._width), frozenset(self._lasts)))

    def _give(self, slot: int, width: int, *, reads: Seq[int] = (), is_last: bool = False) -> int:
        """The buffer for a slot that is written; another one where the operation still reads what it holds."""
        if slot in reads:
            self._spare.append(self._buffer[slot])
            if len(self._spare) > 1:
                self._buffer[slot] = self._spare.pop(0)
            else:
                self._buffer[slot] = len(self.result.buffer_widths)
                self.result.buffer_widths.append(0)
        buffer = self._buffer[slot]
        self._width[slot] = width
        (self._lasts.add if is_last else self._lasts.discard)(slot)
        self.result.buffer_widths[buffer] = max(self.result.buffer_widths[buffer], width)
        return buffer

    def _add(self, name: str, inputs: Seq[int], out: int, **fields: Any) -> None:
        op = self.operation
        self.result.steps.append(
            Step(op=name, layer=op.layer, memory=op.memory, part=self.part, inputs=tuple(inputs), out=out, **fields)
        )
        self._is_quantised.discard(out)

    def _quantised(self, buffer: int, width: int, *, is_last: bool) -> int:
        """The buffer with the quantised rows of another one; -1 where the class is F32."""
        if self._quantised_floats is None:
            return -1
        floats, widths = self._quantised_floats(width), self.result.buffer_widths
        if buffer not in self._quantised_in:
            self._quantised_in[buffer] = len(widths)
            widths.append(0)
        result = self._quantised_in[buffer]
        widths[result] = max(widths[result], floats)
        if buffer not in self._is_quantised:
            self._add("quantise", (buffer,), result, width=width, out_width=floats, is_last=is_last)
            self._is_quantised.add(buffer)
        return result

    # ---- operations

    def plain(self, op: Operation) -> None:
        """An operation in place, or one whose result is as wide as its input."""
        c, slot = op.constants, op.inputs[0]
        width, is_last = self._width[slot], slot in self._lasts
        before = [self._buffer[i] if i >= 0 else -1 for i in op.inputs]
        if op.name in ("copy", "rms_norm"):
            out = self._give(op.outputs[0], width, reads=op.inputs, is_last=is_last)
        else:
            out = before[0]
        fields: dict[str, Any] = {"width": width, "out_width": width, "is_last": is_last}
        for name in ("weight", "bias"):
            if name in c:
                fields["vector"] = np.ascontiguousarray(c[name], np.float32)
        for name in ("eps", "factor", "cap"):
            if name in c:
                fields["f"] = float(np.float32(c[name]))
        if op.name == "mul":
            fields["n"] = (self._width[op.inputs[1]],)
        elif "heads" in c:
            fields["n"] = (c["heads"],)
        self._add(op.name, before, out, **fields)

    def embed(self, op: Operation) -> None:
        weight: Matrix = op.constants["weight"]
        self._add("embed", (), self._give(op.outputs[0], weight.cols), out_width=weight.cols, matrix=weight)

    def matmul(self, op: Operation) -> None:
        weight: Matrix = op.constants["weight"]
        source, is_last = self._buffer[op.inputs[0]], op.inputs[0] in self._lasts
        integers = weight.type not in (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
        quantised = self._quantised(source, weight.cols, is_last=is_last) if integers else -1
        out = self._give(op.outputs[0], weight.rows, reads=op.inputs, is_last=is_last)
        fields = {"width": weight.cols, "out_width": weight.rows, "is_last": is_last}
        self._add("matmul", (source, quantised), out, matrix=weight, **fields)

    def last(self, op: Operation) -> None:
        width, source = self._width[op.inputs[0]], self._buffer[op.inputs[0]]
        out = self._give(op.outputs[0], width, reads=op.inputs, is_last=True)
        self._add("last", (source,), out, width=width, out_width=width)

    def rope(self, op: Operation) -> None:
        # Layers mostly turn alike: one table for all that do.
        key = tuple(
            (name, value.tobytes() if isinstance(value, np.ndarray) else value)
            for name, value in sorted(op.constants.items())
            if name != "heads"
        )
        if key not in self._tables:
            self._tables[key] = PREPARED[op.name](dict(op.constants))["table"]
        table = self._tables[key]
        slot = op.inputs[0]
        fields = {"width": self._width[slot], "out_width": self._width[slot], "is_last": slot in self._lasts}
        buffer = self._buffer[slot]
        self._add(op.name, (buffer,), buffer, n=(op.constants["heads"], table.dimensions), rope=table, **fields)

    def attention(self, op: Operation) -> None:
        c = op.constants
        q, k, v = op.inputs
        heads, kv_heads = c["heads"], c["kv_heads"]
        width, value_width = self._width[q] // heads, self._width[v] // kv_heads
        sources = self._buffer[q], self._buffer[k], self._buffer[v]
        scale = c.get("scale")
        if scale is None:
            scale = 1 / math.sqrt(c.get("scale_width", width))
        sinks = c.get("sinks")
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            value_width=value_width,
            window=min(int(c.get("window", 0)), (1 << 31) - 1),
            scale=float(np.float32(scale)),
            softcap=float(np.float32(c.get("softcap", 0))),
            sinks=None if sinks is None else np.ascontiguousarray(sinks, np.float32),
        )
        self.result.caches[op.memory] = attention
        # Keys and values of all rows are kept before any row is attended to.
        self._add("append", sources[1:], -1, attention=attention)
        out = self._give(op.outputs[0], heads * value_width, reads=op.inputs)
        self._add("attention", sources[:1], out, attention=attention)

    def top_k(self, op: Operation) -> None:
        scores, weights = (*op.inputs, -1)[:2]
        count = int(op.constants["count"])
        sources = [self._buffer[slot] if slot >= 0 else -1 for slot in (scores, weights)]
        is_last = scores in self._lasts
        width = self._width[scores]
        out = self._give(op.outputs[0], count, reads=op.inputs, is_last=is_last)
        self.result.chosen[out] = max(count, self.result.chosen.get(out, 0))
        self._add("top_k", sources, out, width=width, out_width=count, is_last=is_last)

    def experts(self, op: Operation) -> None:
        x, chosen = op.inputs[:2]
        sources = self._buffer[x], self._buffer[chosen]
        is_last = x in self._lasts
        width, count = self._width[x], self._width[chosen]
        outputs: int = op.constants["outputs"]
        was_quantised = sources[0] in self._is_quantised
        quantised = self._quantised(sources[0], width, is_last=is_last)
        out = self._give(op.outputs[0], outputs, reads=op.inputs, is_last=is_last)
        fields = {"width": width, "out_width": outputs, "is_last": is_last}
        self._add("experts", (*sources, quantised), out, n=(count,), experts=op, **fields)
        if not was_quantised:  # where others compute the experts, this operation is left out with all its steps
            self._is_quantised.discard(sources[0])

    def split(self, op: Operation) -> None:
        heads = op.constants.get("heads", 1) if op.name == "split_heads" else 1
        source, is_last = self._buffer[op.inputs[0]], op.inputs[0] in self._lasts
        width, at = self._width[op.inputs[0]], 0
        for slot, piece in zip(op.outputs, op.constants["widths"], strict=True):
            each = piece // heads
            out = self._give(slot, piece, reads=op.inputs, is_last=is_last)
            fields = {"width": width, "out_width": piece, "is_last": is_last}
            self._add("take", (source,), out, n=(heads, width // heads, at, each), **fields)
            at += each


_COMPILE: Mapping[str, Callable[[_Compiler, Operation], None]] = {
    "embed": _Compiler.embed,
    "matmul": _Compiler.matmul,
    "last": _Compiler.last,
    "rope": _Compiler.rope,
    "rope_pairs": _Compiler.rope,
    "attention": _Compiler.attention,
    "top_k": _Compiler.top_k,
    "experts": _Compiler.experts,
    "split": _Compiler.split,
    "split_heads": _Compiler.split,
}
