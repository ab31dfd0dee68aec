"""Operations of a program as the C kernels' steps: buffers for slots, addresses for tensors, barriers where needed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..formats import GGMLType
from ..interface import F32, Operation
from ..matrix import Matrix
from ..parts import parts
from ..reference import PREPARED
from ..rope import RopeTable
from .memory import CacheShape, filled
from .structs import CAttention, CMatrix, CStep

#: Steps by their number in the C source.
NUMBERS = {
    name: number
    for number, name in enumerate(
        "embed rms_norm copy add mul scale softcap add_bias norm_heads rope rope_pairs softmax sigmoid silu gelu "
        "gelu_tanh relu normalize take top_k append quantise last matmul attention experts".split()
    )
}
#: Steps in which all threads work on one result; in all others each thread has rows of its own.
SHARED = frozenset(NUMBERS[name] for name in ("last", "matmul", "attention", "experts"))


@dataclass(frozen=True, slots=True)
class View:
    """Where slots are at some point of the program: buffer, width, and whether a slot holds wanted rows only."""

    buffers: Mapping[int, int]
    widths: Mapping[int, int]
    lasts: frozenset[int]


@dataclass(slots=True)
class Compiled:
    """Steps and what they need beside them. Arrays are kept here because C knows only their addresses."""

    steps: list[CStep] = field(default_factory=list)
    first_step: list[int] = field(default_factory=list)  #: of each operation, and one more for the end
    views: list[View] = field(default_factory=list)  #: before each operation, and at the end
    buffer_widths: list[int] = field(default_factory=list)
    chosen: dict[int, int] = field(default_factory=dict)  #: buffers that top_k fills, with ids a row
    caches: dict[int, CacheShape] = field(default_factory=dict)  #: by memory
    ropes: list[tuple[int, RopeTable]] = field(default_factory=list)  #: steps with their tables
    experts: list[tuple[int, Operation]] = field(default_factory=list)  #: steps with what gives their bank
    kept: list[Any] = field(default_factory=list)


def compile_program(
    operations: Seq[Operation],
    slots: int,
    quantised_floats: Callable[[int], int] | None = None,
    *,
    half_cache: bool = False,
) -> Compiled:
    """Walk the operations once, in order. `quantised_floats` makes products of the i16 class.

    `half_cache`: keys and values are kept in F16.
    """
    compiler = _Compiler(slots, quantised_floats, half_cache)
    for operation, part in zip(operations, parts(operations), strict=True):
        compiler.note()
        compiler.operation, compiler.part = operation, part
        _COMPILE.get(operation.name, _Compiler.plain)(compiler, operation)
    compiler.note()
    _set_barriers(compiler.result.steps)
    return compiler.result


class _Compiler:
    operation: Operation
    part: int

    def __init__(self, slots: int, quantised_floats: Callable[[int], int] | None, half_cache: bool) -> None:
        self._half_cache = half_cache
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

    def _add(self, name: str, inputs: Seq[int], out: int, **fields: Any) -> CStep:
        op = self.operation
        step = CStep(op=NUMBERS[name], layer=op.layer, memory=op.memory, part=self.part, out=out)
        step.inputs[:] = [*inputs, -1, -1, -1][:3]
        for key, value in fields.items():
            if key == "n":
                step.n[: len(value)] = value
            else:
                setattr(step, key, value)
        self.result.steps.append(step)
        self._is_quantised.discard(out)
        return step

    def _vector(self, value: F32) -> int:
        kept = np.ascontiguousarray(value, np.float32)
        self.result.kept.append(kept)
        return kept.ctypes.data

    def _matrix(self, value: Matrix) -> CMatrix:
        self.result.kept.append(value)
        return CMatrix.of(value)

    def _quantised(self, buffer: int, width: int, wanted: int) -> int:
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
            self._add("quantise", (buffer,), result, width=width, out_width=floats, wanted=wanted)
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
        fields: dict[str, Any] = {"width": width, "out_width": width, "wanted": int(is_last)}
        for name in ("weight", "bias"):
            if name in c:
                fields["vector"] = self._vector(c[name])
        for name in ("eps", "factor", "cap"):
            if name in c:
                fields["f"] = float(np.float32(c[name]))
        if op.name == "mul":
            fields["n"] = [self._width[op.inputs[1]]]
        elif "heads" in c:
            fields["n"] = [c["heads"]]
        self._add(op.name, before, out, **fields)

    def embed(self, op: Operation) -> None:
        weight: Matrix = op.constants["weight"]
        self._add(
            "embed", (), self._give(op.outputs[0], weight.cols), out_width=weight.cols, matrix=self._matrix(weight)
        )

    def matmul(self, op: Operation) -> None:
        weight: Matrix = op.constants["weight"]
        source, is_last = self._buffer[op.inputs[0]], op.inputs[0] in self._lasts
        integers = weight.type not in (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
        quantised = self._quantised(source, weight.cols, int(is_last)) if integers else -1
        out = self._give(op.outputs[0], weight.rows, reads=op.inputs, is_last=is_last)
        fields = {"width": weight.cols, "out_width": weight.rows, "wanted": int(is_last)}
        self._add("matmul", (source, quantised), out, matrix=self._matrix(weight), **fields)

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
        self.result.ropes.append((len(self.result.steps), table))
        fields = {"width": self._width[slot], "out_width": self._width[slot], "wanted": int(slot in self._lasts)}
        buffer = self._buffer[slot]
        self._add(op.name, (buffer,), buffer, n=[op.constants["heads"], table.dimensions], **fields)

    def attention(self, op: Operation) -> None:
        c = op.constants
        q, k, v = op.inputs
        heads, kv_heads = c["heads"], c["kv_heads"]
        width, value_width = self._width[q] // heads, self._width[v] // kv_heads
        self.result.caches[op.memory] = CacheShape(kv_heads, filled(width), filled(value_width))
        sources = self._buffer[q], self._buffer[k], self._buffer[v]
        self._add("append", sources[1:], -1, n=[kv_heads, width, value_width, int(self._half_cache)])
        scale = c.get("scale")
        if scale is None:
            scale = 1 / math.sqrt(c.get("scale_width", width))
        sinks = c.get("sinks")
        attention = CAttention(
            heads,
            kv_heads,
            width,
            value_width,
            min(int(c.get("window", 0)), (1 << 31) - 1),
            float(np.float32(scale)),
            float(np.float32(c.get("softcap", 0))),
            None if sinks is None else self._vector(sinks),
            int(self._half_cache),
        )
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
        self._add("top_k", sources, out, width=width, out_width=count, wanted=int(is_last))

    def experts(self, op: Operation) -> None:
        x, chosen = op.inputs[:2]
        sources = self._buffer[x], self._buffer[chosen]
        is_last = x in self._lasts
        width, count = self._width[x], self._width[chosen]
        outputs: int = op.constants["outputs"]
        was_quantised = sources[0] in self._is_quantised
        quantised = self._quantised(sources[0], width, int(is_last))
        out = self._give(op.outputs[0], outputs, reads=op.inputs, is_last=is_last)
        self.result.experts.append((len(self.result.steps), op))
        fields = {"width": width, "out_width": outputs, "wanted": int(is_last)}
        self._add("experts", (*sources, quantised), out, n=[count], **fields)
        if not was_quantised:  # where others compute the experts, this operation is left out with all its steps
            self._is_quantised.discard(sources[0])

    def split(self, op: Operation) -> None:
        heads = op.constants.get("heads", 1) if op.name == "split_heads" else 1
        source, is_last = self._buffer[op.inputs[0]], op.inputs[0] in self._lasts
        width, at = self._width[op.inputs[0]], 0
        for slot, piece in zip(op.outputs, op.constants["widths"], strict=True):
            each = piece // heads
            out = self._give(slot, piece, reads=op.inputs, is_last=is_last)
            fields = {"width": width, "out_width": piece, "wanted": int(is_last)}
            self._add("take", (source,), out, n=[heads, width // heads, at, each], **fields)
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


#: Who a part of a buffer belongs to in a step: rows of so many values, of all rows or of the wanted ones, each to one
#: thread; None where all threads work on the whole.
_Layout = tuple[bool, int] | None
#: The state of a call of experts, which the next call overwrites: a buffer like any other.
_CALL = -1


def _set_barriers(steps: Iterable[CStep]) -> None:
    """Before which steps all threads have to meet.

    Rows that a thread made itself it may read and overwrite at once, as long as they lie where they lay. What all
    threads made or read together, or lay otherwise, asks for a meeting before it is read or written over.
    """
    read = defaultdict[int, set[_Layout]](set)  # since the last meeting
    written = defaultdict[int, set[_Layout]](set)
    for step in steps:
        reads, writes = _accesses(step)
        clashes = [*_others(reads, written), *_others(writes, written), *_others(writes, read)]
        if clashes:
            step.meet = 1
            read.clear()
            written.clear()
        for buffer, layout in reads.items():
            read[buffer].add(layout)
        for buffer, layout in writes.items():
            written[buffer].add(layout)


def _others(accesses: Mapping[int, _Layout], before: Mapping[int, set[_Layout]]) -> Iterable[int]:
    """Buffers that other threads may have had in hand before."""
    return (b for b, layout in accesses.items() if b in before and (layout is None or before[b] != {layout}))


def _accesses(step: CStep) -> tuple[dict[int, _Layout], dict[int, _Layout]]:
    """What a step reads and writes: buffers, the keys and values of a memory, the state of a call."""
    is_shared, wanted = step.op in SHARED, bool(step.wanted)
    widths = [step.width] * 3
    if step.op == NUMBERS["mul"]:
        widths[1] = step.n[0]
    elif step.op == NUMBERS["append"]:
        widths = [step.n[0] * step.n[1], step.n[0] * step.n[2], 0]
    reads: dict[int, _Layout] = {
        buffer: None if is_shared else (wanted, width)
        for buffer, width in zip(step.inputs, widths, strict=True)
        if buffer >= 0
    }
    writes: dict[int, _Layout] = {step.out: None if is_shared else (wanted, step.out_width)} if step.out >= 0 else {}
    if step.op == NUMBERS["append"]:
        writes[-2 - step.memory] = None
    elif step.op == NUMBERS["attention"]:
        reads[-2 - step.memory] = None
    elif step.op == NUMBERS["experts"]:
        writes[_CALL] = None
    return reads, writes
