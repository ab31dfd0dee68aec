"""What the time of an operation is charged to, where it is measured."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from .interface import Operation

#: dense: all that is named nowhere; router: scores and the choice of experts; experts: their rows, computed here;
#: combine: merging them.
PARTS = ("dense", "router", "experts", "combine")


def parts(operations: Seq[Operation]) -> list[int]:
    """For each operation its part, by number. `experts` also merges, which is charged to combine where it is done.

    The router begins with the product whose result top_k reads, and ends with the last change of its weights.
    """
    found, wanted = list[int](), set[int]()
    for op in reversed(operations):
        part = "experts" if op.name == "experts" else "dense"
        if op.on_weights:
            part = "router"
        elif op.name == "top_k":
            part, wanted = "router", {slot for slot in op.inputs if slot >= 0}
        elif wanted & set(op.outputs):
            part = "router"
            if op.name == "matmul":
                wanted -= set(op.outputs)
        found.append(PARTS.index(part))
    return found[::-1]
