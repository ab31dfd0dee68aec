"""Where the threads of a compiled program have to meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from ..steps import Step

#: Steps in which all threads work on one result; in all others each thread has rows of its own.
SHARED = frozenset(("last", "matmul", "attention", "experts"))

#: Who a part of a buffer belongs to in a step: rows of so many values, of all rows or of the wanted ones, each to one
#: thread; None where all threads work on the whole.
_Layout = tuple[bool, int] | None
#: The state of a call of experts, which the next call overwrites: a buffer like any other.
_CALL = -1


def meetings(steps: Seq[Step]) -> list[bool]:
    """Before which steps all threads have to meet, as a flag for each.

    Rows that a thread made itself it may read and overwrite at once, as long as they lie where they lay. What all
    threads made or read together, or lay otherwise, asks for a meeting before it is read or written over.
    """
    read = defaultdict[int, set[_Layout]](set)  # since the last meeting
    written = defaultdict[int, set[_Layout]](set)
    meets = list[bool]()
    for step in steps:
        reads, writes = accesses(step)
        clashes = [*_others(reads, written), *_others(writes, written), *_others(writes, read)]
        meets.append(bool(clashes))
        if clashes:
            read.clear()
            written.clear()
        for buffer, layout in reads.items():
            read[buffer].add(layout)
        for buffer, layout in writes.items():
            written[buffer].add(layout)
    return meets


def _others(accesses: Mapping[int, _Layout], before: Mapping[int, set[_Layout]]) -> Iterable[int]:
    """Buffers that other threads may have had in hand before."""
    return (b for b, layout in accesses.items() if b in before and (layout is None or before[b] != {layout}))


def accesses(step: Step) -> tuple[dict[int, _Layout], dict[int, _Layout]]:
    """What a step reads and writes: buffers, the keys and values of a memory, the state of a call."""
    is_shared = step.op in SHARED
    widths = (step.width, step.width, step.width)
    if step.op == "mul":
        widths = (step.width, step.n[0], 0)
    elif step.op == "append" and step.attention is not None:
        heads = step.attention.kv_heads
        widths = (heads * step.attention.width, heads * step.attention.value_width, 0)
    reads: dict[int, _Layout] = {
        buffer: None if is_shared else (step.is_last, width)
        for buffer, width in zip(step.inputs, widths, strict=False)
        if buffer >= 0
    }
    writes: dict[int, _Layout] = (
        {step.out: None if is_shared else (step.is_last, step.out_width)} if step.out >= 0 else {}
    )
    if step.op == "append":
        writes[-2 - step.memory] = None
    elif step.op == "attention":
        reads[-2 - step.memory] = None
    elif step.op == "experts":
        writes[_CALL] = None
    return reads, writes
