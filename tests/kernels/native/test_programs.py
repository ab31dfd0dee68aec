"""Random programs: any number of threads gives the same bits, and the reference nearly the same values.

Row steps need no barrier between them, shared steps do: every missing one is a race, which the first test finds by
looking at the steps and the second by running them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from native_kit import native, operation, rows_of
from random_programs import EMBEDDINGS, MATRICES, ROWS, SLOTS, Text, names, texts, values_of

from kernels.interface import DenseBackend
from kernels.interpreter import Interpreter
from kernels.native.barriers import SHARED, meetings
from kernels.steps import Step, compile_program


def clashes(steps: list[Step], meets: list[bool]) -> list[tuple[int, int]]:
    """Pairs of steps that must not overlap and between which nobody waits: found pair by pair, with no bookkeeping."""
    phase = list(itertools.accumulate(meets))

    def reads(step: Step) -> list[tuple[Any, int]]:
        """Buffers, each with the width of its rows."""
        second = step.n[0] if step.op == "mul" else step.width
        found: list[tuple[Any, int]] = [
            (slot, width)
            for slot, width in zip(step.inputs, (step.width, second, step.width), strict=False)
            if slot >= 0
        ]
        return found + ([(("cache", step.memory), 0)] if step.op == "attention" else [])

    def writes(step: Step) -> list[tuple[Any, int]]:
        found: list[tuple[Any, int]] = [(step.out, step.out_width)] if step.out >= 0 else []
        found += [(("cache", step.memory), 0)] if step.op == "append" else []
        return found + ([("the call", 0)] if step.op == "experts" else [])

    def overlap(one: Step, two: Step) -> bool:
        """Whether a thread may touch in one step what another one touches in the other step, and one of them writes."""
        by_rows = one.op not in SHARED and two.op not in SHARED and one.is_last == two.is_last
        both = itertools.chain(
            itertools.product(writes(one), writes(two) + reads(two)), itertools.product(reads(one), writes(two))
        )
        return any(a == b and not (by_rows and w == v) for (a, w), (b, v) in both)

    return [
        (i, j)
        for i, j in itertools.combinations(range(len(steps)), 2)
        if phase[i] == phase[j] and overlap(steps[i], steps[j])
    ]


def test_the_oracle_of_barriers_sees_a_missing_one() -> None:
    x = operation("embed", (), (0,), weight=EMBEDDINGS[64])
    steps = compile_program([x, operation("matmul", (0,), (1,), weight=MATRICES[64, 64])], 2).steps
    assert meetings(steps) == [False, True]
    assert clashes(steps, [False, True]) == []
    assert clashes(steps, [False, False]) == [(0, 1)]


@settings(max_examples=300, deadline=None)
@drawn(texts())
def test_no_two_steps_that_clash_lie_between_two_barriers(text: Callable[[DenseBackend], Text]) -> None:
    operations = text(native()).operations
    for quantised_floats in (None, lambda width: width):  # both classes
        steps = compile_program(operations, SLOTS + 2, quantised_floats).steps
        assert clashes(steps, meetings(steps)) == []


@settings(max_examples=150, deadline=None)
@drawn(texts(), st.sampled_from([1, 2, 7, ROWS]), st.randoms(use_true_random=False), st.sampled_from(["f32", "i16"]))
def test_threads_do_not_decide_and_the_reference_agrees(
    text: Callable[[DenseBackend], Text], count: int, random: Any, activations: str
) -> None:
    one = text(native(1, activations))
    cut = random.randint(0, len(one.operations))
    expected = values_of(one, native(1, activations), count, cut)
    for backend in (native(3, activations), native(2, activations)):
        theirs = text(backend)
        for again in range(3):
            found = values_of(theirs, backend, count, cut if again else 0)
            for slot, values in expected.items():
                assert found[slot].tobytes() == values.tobytes(), f"register {slot} of {names(theirs)}"
    if not one.has_experts:  # a choice of experts between equals is nobody's to predict
        bar = {"f32": 1e-3, "i16": 2e-2}[activations]
        plain = Interpreter(one.operations, [1] * (SLOTS + 2))
        run_ = plain.begin(rows_of(count, plain.sequence(), wanted=sorted({0, count // 3, count - 1})))
        run_.run(0, len(one.operations))
        for slot, values in expected.items():
            theirs_ = run_.values(slot)
            assert values.shape == theirs_.shape
            assert np.abs(values - theirs_).max() <= bar * np.abs(theirs_).max() + 1e-6, (
                f"register {slot}: {names(one)}"
            )
