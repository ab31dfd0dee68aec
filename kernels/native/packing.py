"""Steps as the structures that C reads: numbers for words, addresses for arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from ..steps import Step
from .barriers import meetings
from .memory import address
from .structs import CAttention, CMatrix, CStep

#: Steps by their number in the C source.
NUMBERS = {
    name: number
    for number, name in enumerate(
        "embed rms_norm copy add mul scale softcap add_bias norm_heads rope rope_pairs softmax sigmoid silu gelu "
        "gelu_tanh relu normalize take top_k append quantise last matmul attention experts".split()
    )
}


def pack(steps: Seq[Step], *, half_cache: bool) -> Any:
    """An array of CStep. Whoever holds it holds the steps too: C knows the addresses of their arrays only.

    Addresses of RoPE's tables and of banks come later. `half_cache`: keys and values are kept in F16.
    """
    packed = (CStep * max(1, len(steps)))()
    for i, (step, meets) in enumerate(zip(steps, meetings(steps), strict=True)):
        packed[i] = _packed(step, meets, half_cache)
    return packed


def _packed(step: Step, meets: bool, half_cache: bool) -> CStep:
    found = CStep(
        op=NUMBERS[step.op],
        layer=step.layer,
        meet=meets,
        wanted=step.is_last,
        out=step.out,
        width=step.width,
        out_width=step.out_width,
        f=step.f,
        memory=step.memory,
        part=step.part,
    )
    found.inputs[:] = [*step.inputs, -1, -1, -1][:3]
    n = step.n
    if step.vector is not None:
        found.vector = address(step.vector)
    if step.matrix is not None:
        found.matrix = CMatrix.of(step.matrix)
    if step.attention is not None:
        a = step.attention
        sinks = None if a.sinks is None else address(a.sinks)
        found.attention = CAttention(
            *(a.heads, a.kv_heads, a.width, a.value_width, a.window, a.scale, a.softcap, sinks, half_cache)
        )
        n = (a.kv_heads, a.width, a.value_width, half_cache) if step.op == "append" else ()
    found.n[: len(n)] = n
    return found
