"""Random programs for any backend: hypothesis draws one, backends run the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from native_kit import F32, PLAIN_ROPE, bound, f32_matrix, operation, rows_of, weights

from kernels.formats import GGMLType
from kernels.interface import DenseBackend, ExpertWeights, Operation

SLOTS = 4  #: registers; beside them the two of a choice of experts
SCORES, CHOSEN = SLOTS, SLOTS + 1
WIDTHS = (24, 40, 64)
ROWS = 23
RANDOM = np.random.default_rng(12)
EMBEDDINGS = {w: f32_matrix(RANDOM.standard_normal((ROWS, w)).astype(np.float32)) for w in WIDTHS}
NORMS = {w: RANDOM.uniform(0.5, 1.5, w).astype(np.float32) for w in WIDTHS}
HEAD_NORMS = {w: RANDOM.uniform(0.5, 1.5, w // 4).astype(np.float32) for w in WIDTHS}
MATRICES = {
    (w, out): weights(GGMLType.Q8_0 if w == 64 and out != 40 else GGMLType.F32, out, w, RANDOM)
    for w in WIDTHS
    for out in (*WIDTHS, 5)
}
EXPERTS = {
    e: ExpertWeights(
        gate=weights(GGMLType.Q8_0, 96, 64, RANDOM),
        up=weights(GGMLType.Q8_0, 96, 64, RANDOM),
        down=weights(GGMLType.Q8_0, 64, 96, RANDOM),
        activation="silu",
    )
    for e in range(5)
}
ROPE = PLAIN_ROPE | {"dimensions": 4, "base": 100.0, "heads": 4}
IN_PLACE: dict[str, Callable[[int], dict[str, Any]]] = {
    "silu": lambda w: {},
    "gelu_tanh": lambda w: {},
    "sigmoid": lambda w: {},
    "softmax": lambda w: {},
    "scale": lambda w: {"factor": 0.7},
    "softcap": lambda w: {"cap": 3.0},
    "add_bias": lambda w: {"bias": NORMS[w]},
    "norm_heads": lambda w: {"weight": HEAD_NORMS[w], "heads": 4, "eps": 1e-6},
    "rope": lambda w: ROPE,
}


@dataclass
class Text:
    """A program in the making: always one that is allowed."""

    operations: list[Operation] = field(default_factory=list)
    width: dict[int, int] = field(default_factory=dict)
    lasts: set[int] = field(default_factory=set)
    has_experts: bool = False

    def add(self, draw: Callable[[Any], Any], banks: Callable[[], Any]) -> None:
        """One more operation, or a few that belong together."""
        kinds = ["embed"]
        if self.width:
            kinds += (
                ["in place"] * 3
                + ["matmul"] * 4
                + ["copy", "rms_norm", "add", "add", "mul", "last", "split", "experts"]
            )
        kind, out = draw(st.sampled_from(kinds)), draw(st.integers(0, SLOTS - 1))
        x = draw(st.sampled_from(sorted(self.width))) if self.width else -1
        width = self.width.get(x, 0)
        others = [s for s, w in self.width.items() if w == width and (s in self.lasts) == (x in self.lasts)]
        if kind == "embed":
            width = draw(st.sampled_from(WIDTHS))
            self.give(operation("embed", (), (out,), weight=EMBEDDINGS[width]), width, is_last=False)
        elif kind == "in place":
            name = draw(st.sampled_from(sorted(set(IN_PLACE) - ({"rope"} if x in self.lasts else set()))))
            self.operations.append(operation(name, (x,), (x,), **IN_PLACE[name](width)))
        elif kind == "matmul":
            to = draw(st.sampled_from(WIDTHS))
            self.give(operation("matmul", (x,), (out,), weight=MATRICES[width, to]), to, x in self.lasts)
        elif kind in ("copy", "rms_norm"):
            constants = {"weight": NORMS[width], "eps": 1e-6} if kind == "rms_norm" else {}
            self.give(operation(kind, (x,), (out,), **constants), width, x in self.lasts)
        elif kind in ("add", "mul"):
            self.operations.append(operation(kind, (x, draw(st.sampled_from(others))), (x,)))
            self.operations.append(operation("rms_norm", (x,), (x,), weight=NORMS[width], eps=1e-6))  # else it grows
        elif kind == "last" and x not in self.lasts:
            self.give(operation("last", (x,), (out,)), width, is_last=True)
        elif kind == "split" and width == 64:
            two = draw(st.permutations(range(SLOTS)))[:2]
            self.operations.append(operation("split", (x,), two, widths=(24, 40)))
            for slot, piece in zip(two, (24, 40), strict=True):
                self.note(slot, piece, x in self.lasts)
        elif kind == "experts" and width == 64:
            self.has_experts = True
            self.operations += [
                operation("matmul", (x,), (SCORES,), weight=MATRICES[64, 5]),
                operation("top_k", (SCORES, -1), (CHOSEN,), count=2, layer=0),
            ]
            if draw(st.booleans()):
                self.operations.append(operation("softmax", (CHOSEN,), (CHOSEN,), on_weights=True, layer=0))
            for to in (out, draw(st.integers(0, SLOTS - 1))):
                if self.width.get(x) == 64:  # two in a row read the same choice
                    step = operation("experts", (x, CHOSEN), (to,), bank=banks, outputs=64, layer=0)
                    self.give(step, 64, x in self.lasts)
                    if to == x:
                        break

    def give(self, op: Operation, width: int, is_last: bool) -> None:
        self.operations.append(op)
        self.note(op.outputs[0], width, is_last)

    def note(self, slot: int, width: int, is_last: bool) -> None:
        self.width[slot] = width
        (self.lasts.add if is_last else self.lasts.discard)(slot)


@st.composite
def texts(draw: Callable[[Any], Any]) -> Callable[[DenseBackend], Text]:
    """A program of up to 14 operations for any backend: its choices are drawn once."""
    choices = list[Any]()

    def noted(strategy: Any) -> Any:
        choices.append(draw(strategy))
        return choices[-1]

    length, first = draw(st.integers(1, 14)), Text()
    for _ in range(length):
        first.add(noted, lambda: None)

    def for_backend(backend: DenseBackend) -> Text:
        text, again, bank = Text(), iter(choices), backend.load(EXPERTS)
        for _ in range(length):
            text.add(lambda _: next(again), lambda: bank)
        return text

    return for_backend


def values_of(text: Text, backend: DenseBackend, count: int, cut: int) -> dict[int, F32]:
    """What every register holds at the end of a program that is left once on its way."""
    program = bound(text.operations, backend)
    sequence = program.sequence()
    rows = rows_of(count, sequence, wanted=sorted({0, count // 3, count - 1}))
    on_its_way = program.begin(rows)
    on_its_way.run(0, cut)
    on_its_way.run(cut, len(text.operations))
    found = {slot: on_its_way.values(slot).copy() for slot in text.width}
    on_its_way.close()
    return found


def names(text: Text) -> str:
    return "; ".join(f"{op.outputs} = {op.name}{op.inputs}" for op in text.operations)
