"""Devices compute native's bits: every type and width, every operation, attention, experts, whole programs.

Native's own bits are held to an emulation of the canonical order in tests/kernels/native.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_kit import CASES, Case, program_of
from device_kit import ALL, DIVIDING, DRIVERS, device_backend
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from native_kit import (
    F32,
    bound,
    given,
    native,
    operation,
    random_blocks,
    result,
    rows_of,
    run,
    same_bits,
    weights,
)
from random_programs import ROWS, Text, names, texts, values_of

from kernels import reference
from kernels.device import probe
from kernels.formats import FORMATS, GGMLType
from kernels.interface import DenseBackend, ExpertWeights, NumericClass
from kernels.matrix import Matrix
from kernels.quants import dequantise

WIDTHS = (1, 8, 9, 256)
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
CASES_OF_PRODUCTS = [
    *((type_, 512) for type_ in GGMLType),
    *((type_, 96) for type_ in GGMLType if FORMATS[type_].block <= 32),
    *((type_, cols) for type_ in FLOATS for cols in (1, 31, 40, 100)),
]


def products(backend: DenseBackend, matrix: Matrix, x: F32) -> F32:
    """matrix times each row of x, in one batch."""
    return result([given(0, x), operation("matmul", (0,), (1,), weight=matrix)], len(x), 1, backend)


@pytest.mark.parametrize("device", ALL)
def test_the_class_is_found_by_the_bits(device: str) -> None:
    assert device_backend(device).numeric_class == native().numeric_class == NumericClass(name="canonical-1")


def test_the_known_answer_is_native_s_and_tells_a_single_bit() -> None:
    banks = [(native().load(experts), x) for experts, x in probe.questions()]
    assert probe.digest(banks) == probe.CANONICAL
    rows = np.concatenate([bank.rows(x, np.array([[0, 0], [1, 0], [2, 0]], np.int32)) for bank, x in banks])
    assert ((np.abs(rows) < 2.0**-126) & (rows != 0)).sum() > 100  # a device that flushes them gives others

    class Off:
        def rows(self, x: F32, pairs: Any) -> F32:
            rows = banks[0][0].rows(x, pairs)
            rows[1, 5] = np.nextafter(rows[1, 5], np.float32(1))
            return rows

    assert probe.digest([(Off(), banks[0][1]), *banks[1:]]) != probe.CANONICAL


@pytest.mark.parametrize("device", DRIVERS)
@pytest.mark.parametrize(("type_", "cols"), CASES_OF_PRODUCTS, ids=lambda v: str(getattr(v, "name", v)))
def test_products_at_every_width(type_: GGMLType, cols: int, device: str) -> None:
    random = np.random.default_rng(cols)
    matrix = weights(type_, 29, cols, random)
    x = (random.standard_normal((WIDTHS[-1], cols)) * 2.0 ** random.integers(-9, 9, (1, cols))).astype(np.float32)
    expected = products(native(), matrix, x)
    for width in WIDTHS:
        same_bits(products(device_backend(device), matrix, x[:width]), expected[:width])


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_products_with_every_kind_of_finite_scale(type_: GGMLType, device: str) -> None:
    random = np.random.default_rng(int(type_))
    data = random_blocks(type_, 7 * 512 // FORMATS[type_].block, random).reshape(7, -1)
    x = random.standard_normal((3, 512)).astype(np.float32)
    x[1], x[2] = x[1] * np.float32(2.0**-140), x[2] * np.float32(2.0**100)
    matrix = Matrix.of(type_, 7, 512, data.reshape(-1))
    expected, ours = products(native(), matrix, x), products(device_backend(device), matrix, x)
    finite = np.isfinite(expected)
    same_bits(ours[finite], expected[finite])
    assert not np.isfinite(ours[~finite]).any()
    same_bits(products(device_backend(device), matrix, x[:1]), ours[:1])


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_embedding_is_dequantising(type_: GGMLType, device: str) -> None:
    matrix = weights(type_, 9, 512, np.random.default_rng(1))
    tokens = [8, 0, 3, 3]
    operations = [operation("embed", (), (0,), weight=matrix)]
    program = bound(operations, device_backend(device))
    ours = run(program, operations, rows_of(4, program.sequence(), tokens=tokens))
    same_bits(ours, dequantise(type_, matrix.data)[tokens])


def numbers(count: int) -> F32:
    """Numbers of every size, with those that are easily got wrong."""
    random = np.random.default_rng(3)
    special = [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1.1754944e-38,
        3.4e38,
        np.inf,
        -np.inf,
        np.nan,
        88.7,
        88.8,
        -86,
        -87,
        -104,
        0.625,
    ]
    bits = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    ordinary = (random.standard_normal(count) * 2.0 ** random.integers(-12, 8, count)).astype(np.float32)
    return np.concatenate([np.array(special, np.float32), bits, ordinary])


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        *((word, {}) for word in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "softmax")),
        ("scale", {"factor": 0.7}),
        ("softcap", {"cap": 30.0}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_functions_on_every_kind_of_number(name: str, constants: dict[str, Any], device: str) -> None:
    x = numbers(2000)[None]
    if name == "softmax":
        x = x[:, np.isfinite(x[0])][:, -1999:]
    operations = [given(0, x), operation(name, (0,), (0,), **constants)]
    expected, ours = result(operations, 1, 0, native()), result(operations, 1, 0, device_backend(device))
    is_number = ~np.isnan(expected)
    same_bits(ours[is_number], expected[is_number])
    assert np.isnan(ours[~is_number]).all()


@pytest.mark.parametrize("device", DIVIDING)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case, device: str) -> None:
    operations, program, _ = program_of(case)
    expected = run(program, operations, rows_of(case.keys, program.sequence()), 3)
    ours = bound(operations, device_backend(device))
    same_bits(run(ours, operations, rows_of(case.keys, ours.sequence()), 3), expected)
    sequence, at = ours.sequence(), 0
    for size in (case.keys - case.keys // 3, *([1] * min(3, case.keys // 3))):
        part = run(ours, operations, rows_of(size, sequence, first=at), 3)
        same_bits(part, expected[at : at + size])
        at += size


def test_attention_of_the_cuda_branch() -> None:
    for case in (
        Case(keys=40, width=40, window=7),
        Case(keys=33, heads=3, kv_heads=1, width=20, sinks=True, softcap=3.0),
    ):
        operations, program, _ = program_of(case)
        expected = run(program, operations, rows_of(case.keys, program.sequence()), 3)
        ours = bound(operations, device_backend("cuda-shim"))
        same_bits(run(ours, operations, rows_of(case.keys, ours.sequence()), 3), expected)


@pytest.mark.parametrize("device", DRIVERS)
def test_sequences_in_one_batch_and_one_that_is_cut_back(device: str) -> None:
    case = Case(keys=120, width=32, window=50)
    operations, program, _ = program_of(case)
    backends = {"native": program, "device": bound(operations, device_backend(device))}
    found = dict[str, list[F32]]()
    for name, each in backends.items():
        one, two = each.sequence(), each.sequence()
        rows = rows_of(40, one)
        rows.sequences[10:25] = [two] * 15
        rows.positions[10:25] = np.arange(15)
        rows.positions[25:] = np.arange(10, 25)
        found[name] = [run(each, operations, rows, 3)]
        one.truncate(20)
        found[name].append(run(each, operations, rows_of(100, one, first=20), 3))  # grows past its first room
        found[name].append(run(each, operations, rows_of(1, two, first=15), 3))
        with pytest.raises(ValueError, match="position 3 does not follow the 16"):
            run(each, operations, rows_of(1, two, first=3), 3)
    for expected, ours in zip(found["native"], found["device"], strict=True):
        same_bits(ours, expected)


@settings(max_examples=60, deadline=None)
@drawn(texts(), st.sampled_from([1, 2, 7, ROWS]), st.randoms(use_true_random=False))
def test_random_programs(text: Callable[[DenseBackend], Text], count: int, random: Any) -> None:
    one = text(native())
    cut = random.randint(0, len(one.operations))
    expected = values_of(one, native(), count, cut)
    for device in ("pyopencl", "cuda-shim"):
        theirs = text(device_backend(device))
        found = values_of(theirs, device_backend(device), count, cut)
        for slot, values in expected.items():
            assert found[slot].tobytes() == values.tobytes(), f"{device}: register {slot} of {names(theirs)}"


def experts(
    type_: GGMLType, word: str, count: int, *, biases: bool = False, hidden: int = 256
) -> dict[int, ExpertWeights]:
    random = np.random.default_rng(int(type_))

    def bias(n: int) -> F32 | None:
        return random.standard_normal(n).astype(np.float32) if biases else None

    return {
        3 * e: ExpertWeights(
            gate=weights(type_, hidden, 256, random),
            up=weights(type_, hidden, 256, random),
            down=weights(type_, 256, hidden, random),
            activation=word,
            gate_bias=bias(hidden),
            up_bias=bias(hidden),
            down_bias=bias(256),
        )
        for e in range(count)
    }


@pytest.mark.parametrize("device", DRIVERS)
@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_expert_rows_of_every_type_and_width(type_: GGMLType, device: str) -> None:
    """Native's bits; two runs; any width; and within 1e-5 of float64 in the worst row."""
    held = experts(type_, "silu", 3)
    ours, theirs = device_backend(device).load(held), native().load(held)
    random = np.random.default_rng(5)
    x = random.standard_normal((WIDTHS[-1], 256)).astype(np.float32)
    pairs = np.stack([random.permutation(len(x)), random.choice(list(held), len(x))], axis=1).astype(np.int32)
    expected = theirs.rows(x, pairs)
    for width in WIDTHS:
        same_bits(ours.rows(x, pairs[:width]), expected[:width])
    same_bits(ours.rows(x, pairs), expected)
    exact = np.stack([exact_row(held[e], x[r]) for r, e in pairs])
    error = np.linalg.norm(expected - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error.max() <= 1e-5


def exact_row(e: ExpertWeights, x: F32) -> Any:
    """An expert's row in float64."""
    gate, up, down = (dequantise(m.type, m.data).astype(np.float64) for m in (e.gate, e.up, e.down))
    g = gate @ x
    return down @ (g / (1 + np.exp(-g)) * (up @ x))


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("word", sorted(reference.ACTIVATIONS))
def test_experts_with_every_activation_and_biases(word: str, device: str) -> None:
    held = experts(GGMLType.Q4_1, word, 2, biases=True, hidden=64)
    x = np.random.default_rng(6).standard_normal((9, 256)).astype(np.float32)
    pairs = np.array([(r, e) for r in range(9) for e in held], np.int32)
    for chosen in (pairs, pairs[:1], pairs[::4]):
        same_bits(device_backend(device).load(held).rows(x, chosen), native().load(held).rows(x, chosen))


def test_gate_and_up_of_two_types_and_rows_that_do_not_fill_their_lanes() -> None:
    random = np.random.default_rng(8)
    two_types = {
        0: ExpertWeights(
            gate=weights(GGMLType.Q8_0, 64, 96, random),
            up=weights(GGMLType.Q4_0, 64, 96, random),
            down=weights(GGMLType.F16, 40, 64, random),
            activation="gelu_tanh",
        )
    }
    odd = {
        e: ExpertWeights(
            gate=weights(GGMLType.F32, 33, 41, random),
            up=weights(GGMLType.F32, 33, 41, random),
            down=weights(GGMLType.BF16, 41, 33, random),
            activation="silu",
        )
        for e in range(2)
    }
    for held, width in ((two_types, 96), (odd, 41)):
        x = random.standard_normal((10, width)).astype(np.float32)
        pairs = np.array([(r, r % len(held)) for r in range(10)], np.int32)
        for device in ("pyopencl", "cuda-shim"):
            same_bits(device_backend(device).load(held).rows(x, pairs), native().load(held).rows(x, pairs))


@pytest.mark.parametrize("device", ALL)
def test_division_and_root_of_integers_round_as_the_cpu_does(device: str) -> None:
    """Softmax, norms and the like reach few quotients; these are all kinds."""
    from kernels.device import sources
    from kernels.device.driver import Driver

    backend = device_backend(device)
    driver: Any = backend._kernels.device
    assert isinstance(driver, Driver)
    source = (
        sources._text("compat", "functions")
        + """
KERNEL(64) void both(GLOBAL const float *a, GLOBAL const float *b, GLOBAL float *q, GLOBAL float *r, int n) {
  int i = GROUP * 64 + ITEM;
  if (i >= n) return;
  q[i] = divide(a[i], b[i]);
  r[i] = square_root(a[i]);
}
"""
    )
    a, random = numbers(6000), np.random.default_rng(9)
    b = random.permutation(a)
    with np.errstate(all="ignore"):
        near = (a * (1 + np.float32(2.0**-23) * random.integers(-3, 4, len(a)))).astype(np.float32)
    tiny = np.full(len(a), 3, np.uint32).view(np.float32) * random.integers(1, 1 << 20, len(a)).astype(np.float32)
    a, b = np.concatenate([a, a, tiny, b]), np.concatenate([b, near, a, tiny])
    buffers = [driver.alloc(a.nbytes) for _ in range(4)]
    driver.write(buffers[0], a)
    driver.write(buffers[1], b)
    driver.launch(driver.build(source, {}), "both", (-(-len(a) // 64), 1), 64, [*buffers, np.int32(len(a))])
    quotients, roots = np.empty_like(a), np.empty_like(a)
    driver.read(buffers[2], quotients)
    driver.read(buffers[3], roots)
    with np.errstate(all="ignore"):
        for ours, expected in ((quotients, a / b), (roots, np.sqrt(a))):
            is_number = ~np.isnan(expected)
            same_bits(ours[is_number], expected[is_number])
            assert np.isnan(ours[~is_number]).all()
