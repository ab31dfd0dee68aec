"""Attention steps of many shapes, alone in a program of the native backend.

Legend: H heads, K kv heads, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from native_kit import F32, bound, given, native, operation

from kernels.interface import DenseBackend, Operation, Program


@dataclass(frozen=True)
class Case:
    """Shapes and options of one attention step."""

    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    value_width: int = 0
    keys: int = 257
    window: int = 0
    sinks: bool = False
    softcap: float = 0
    scale: float | None = None

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in vars(self).items() if value)

    def random(self) -> tuple[F32, F32, F32, F32 | None]:
        """q, k, v and sinks for every position."""
        random = np.random.default_rng(self.keys + self.width)
        values = self.value_width or self.width
        shapes = (self.heads * self.width, self.kv_heads * self.width, self.kv_heads * values)
        q, k, v = (random.standard_normal((self.keys, n)).astype(np.float32) for n in shapes)
        return q * np.float32(1.5), k, v, random.standard_normal(self.heads).astype(np.float32) if self.sinks else None

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return 1 / math.sqrt(self.width) if self.scale is None else self.scale

    def constants(self, sinks: F32 | None) -> dict[str, Any]:
        """The operation's."""
        found: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "window": self.window}
        found |= {"softcap": self.softcap} if self.softcap else {}
        found |= {"scale": self.scale} if self.scale is not None else {}
        return found | ({"sinks": sinks} if sinks is not None else {})


CASES = [
    *(Case(width=w, heads=h, kv_heads=k) for w, h, k in [(16, 4, 4), (80, 6, 2), (128, 8, 1), (256, 4, 1), (20, 3, 3)]),
    *(Case(keys=n, width=32) for n in (1, 31, 33, 255, 256, 257, 700)),
    *(Case(keys=700, width=16, window=w) for w in (1, 5, 32, 256, 300, 699, 700, 5000)),
    *(Case(keys=300, width=16, sinks=True, window=w) for w in (0, 64)),
    *(Case(keys=300, width=16, softcap=c, sinks=s) for c, s in [(30.0, False), (2.0, True)]),
    *(Case(keys=70, width=24, heads=h, kv_heads=k) for h, k in [(13, 1), (26, 2), (80, 1)]),  # larger groups
    Case(keys=300, width=48, value_width=80),
    Case(keys=300, width=80, value_width=16, window=77),
    Case(keys=270, scale=0.3),
    Case(keys=2, width=256, value_width=256),
]


def program_of(
    case: Case, backend: DenseBackend | None = None
) -> tuple[list[Operation], Program, tuple[F32, F32, F32, F32 | None]]:
    """Its program, with two threads unless a backend is given, and its inputs; the result is in slot 3."""
    q, k, v, sinks = case.random()
    operations = [given(slot, x) for slot, x in enumerate((q, k, v))]
    operations.append(operation("attention", (0, 1, 2), (3,), memory=0, layer=0, **case.constants(sinks)))
    return operations, bound(operations, backend or native(2)), (q, k, v, sinks)
