"""Functions of a value and of a row against float64, at bars a little above what they measure; and at their extremes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import canonical
import numpy as np
import pytest
from native_kit import (
    F32,
    FUNCTIONS,
    PLAIN_ROPE,
    bound,
    compiled,
    given,
    mapped,
    native,
    operation,
    result,
    rows_of,
    run,
    same_bits,
)

from kernels import reference

RNG = np.random.default_rng(8)
WIDE = np.longdouble


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions, for this machine's registers."""
    return compiled(FUNCTIONS, tmp_path_factory.mktemp("functions"))


def arguments(low: float, high: float) -> F32:
    """Values from low to high, evenly and around zero."""
    spread = (np.linspace(low, high, 200_000), RNG.standard_normal(50_000), RNG.standard_normal(50_000) * 1e-3)
    return np.clip(np.concatenate(spread), low, high).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def by_hand(function: Callable[[float], float]) -> Callable[[Any], Any]:
    return np.vectorize(function, otypes=[WIDE])  # type: ignore[return-value]


def gelu_tanh(x: Any) -> Any:
    return x * sigmoid(2 * np.sqrt(2 / WIDE(math.pi)) * (x + WIDE("0.044715") * x**3))


def ulps(ours: F32, exact: Any) -> float:
    """The largest difference in units of the exact value's last place."""
    unit = np.spacing(np.abs(exact.astype(np.float32)))
    return float((np.abs(ours.astype(WIDE) - exact) / unit).max())


@pytest.mark.parametrize(
    ("name", "exact", "low", "high", "bar"),
    [
        ("exp", np.exp, -86, 88.7, 0.9),  # measured: 0.84
        ("sigmoid", sigmoid, -80, 100, 2.5),  # 2.33
        ("silu", lambda x: x * sigmoid(x), -80, 100, 2.5),  # 2.3
        ("tanh", np.tanh, -100, 100, 1.4),  # 1.34
        ("erf", by_hand(math.erf), -10, 10, 1.1),  # 0.98
        ("gelu", by_hand(lambda x: x * math.erfc(-x / math.sqrt(2)) / 2), 0, 20, 3.2),
        ("gelu_tanh", gelu_tanh, 0, 20, 3.2),
        ("relu", lambda x: np.maximum(x, 0), -100, 100, 0),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_ulps_to_float64(name: str, exact: Any, low: float, high: float, bar: float, library: ctypes.CDLL) -> None:
    x = arguments(low, high)
    assert ulps(mapped(library, f"{name}_of", x), exact(x.astype(WIDE))) <= bar


@pytest.mark.parametrize(
    ("name", "exact"), [("gelu", by_hand(lambda x: x * math.erfc(-x / math.sqrt(2)) / 2)), ("gelu_tanh", gelu_tanh)]
)
def test_gelu_where_it_falls_off(name: str, exact: Any, library: ctypes.CDLL) -> None:
    x = arguments(-30, 0)
    assert (np.abs(mapped(library, f"{name}_of", x) - exact(x.astype(WIDE))) <= 1.3e-7 * np.abs(x)).all()


def test_exp_grows_and_is_exact_at_zero(library: ctypes.CDLL) -> None:
    x = np.sort(arguments(-90, 90))
    assert (np.diff(np.minimum(mapped(library, "exp_of", x), np.float32(3e38))) >= 0).all()
    assert mapped(library, "exp_of", np.float32([0, -0.0, 1e-40])).tolist() == [1, 1, 1]
    below, above = np.float32(88.7228), np.float32(88.7229)  # ln of the largest float32 is between them
    assert np.isfinite(mapped(library, "exp_of", below[None])).all()
    assert np.isinf(mapped(library, "exp_of", above[None])).all()


EXTREMES = np.float32([0, -0.0, 88, -88, 1000, -1000, 3e38, -3e38, 1e-40, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "erf", "relu", "exp"])
def test_extremes(name: str, library: ctypes.CDLL) -> None:
    ours = mapped(library, f"{name}_of", EXTREMES)
    assert np.isnan(ours[-1])
    assert not np.isnan(ours[:-3]).any()
    limits = {"sigmoid": (1, 0), "tanh": (1, -1), "erf": (1, -1), "exp": (np.inf, 0)}.get(name)
    for at in (4, 6, 9):
        assert ours[at] == (limits[0] if limits else EXTREMES[at])
    for at in (5, 7):
        assert abs(ours[at] - (limits[1] if limits else 0)) <= 1e-37


def test_variants_of_the_functions_have_the_same_bits(library: ctypes.CDLL, tmp_path: Path) -> None:
    plain = compiled(FUNCTIONS, tmp_path, "-DLANES_PLAIN")
    x = np.concatenate([arguments(-100, 100), EXTREMES, RNG.integers(0, 1 << 32, 50_000, np.uint32).view(np.float32)])
    for name in ("sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "erf", "exp"):
        same_bits(mapped(library, f"{name}_of", x), mapped(plain, f"{name}_of", x))


UNARY = ["sigmoid", "silu", "gelu", "gelu_tanh", "relu"]


@pytest.mark.parametrize("width", [1, 15, 16, 33, 100])
@pytest.mark.parametrize("name", UNARY)
def test_operations_are_the_functions(name: str, width: int, library: ctypes.CDLL) -> None:
    """Whatever the width: a tail goes through a full register."""
    x = RNG.standard_normal((7, width)).astype(np.float32) * 4
    ours = result([given(0, x), operation(name, (0,), (0,))], 7, backend=native(2))
    same_bits(ours, mapped(library, f"{name}_of", x).reshape(x.shape))


def checked(name: str, x: F32, bar: float, **constants: Any) -> F32:
    """One operation in place (rms_norm: into the same slot) against the reference in float64, relative to the largest."""
    ours = result([given(0, x), operation(name, (0,), (0,), **constants)], len(x), backend=native(2))
    exact = reference.OPERATIONS[name](x, **constants)
    difference = np.abs(ours.astype(np.float64) - exact).max(axis=1)
    assert (difference <= bar * np.abs(exact).max(axis=1)).all(), difference / np.abs(exact).max(axis=1)
    return ours


@pytest.mark.parametrize("width", [1, 31, 32, 96, 100, 640, 2048])
def test_rms_norm(width: int) -> None:
    x = (RNG.standard_normal((9, width)) * 10.0 ** RNG.integers(-3, 4, (9, 1))).astype(np.float32)
    weight = RNG.standard_normal(width).astype(np.float32)
    ours = checked("rms_norm", x, 3e-7, weight=weight, eps=1e-6)
    # To the bit: squares by FMA in lanes, the tree; division and root are correctly rounded; the weight comes last.
    squares = np.array([canonical.products(row[None], row[None])[0, 0] for row in x])
    by = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(1e-6))
    same_bits(ours, x * by[:, None] * weight)


@pytest.mark.parametrize(("heads", "width"), [(1, 64), (3, 20), (4, 128), (8, 33)])
def test_norm_heads_is_rms_norm_of_each_head(heads: int, width: int) -> None:
    x = RNG.standard_normal((6, heads * width)).astype(np.float32)
    weight = RNG.standard_normal(width).astype(np.float32)
    ours = checked("norm_heads", x, 3e-7, weight=weight, heads=heads, eps=1e-5)
    apart = result(
        [given(0, x.reshape(-1, width)), operation("rms_norm", (0,), (1,), weight=weight, eps=1e-5)], 6 * heads, 1
    )
    same_bits(ours, apart.reshape(ours.shape))


@pytest.mark.parametrize("width", [1, 4, 31, 32, 100, 256, 1000])
def test_softmax(width: int, library: ctypes.CDLL) -> None:
    x = (RNG.standard_normal((8, width)) * 10.0 ** np.arange(-4, 4)[:, None]).astype(np.float32)
    ours = checked("softmax", x, 4e-7)
    e = mapped(library, "exp_of", x - x.max(axis=1, keepdims=True))
    same_bits(ours, e / canonical.total(e)[:, None])
    assert np.abs(ours.astype(np.float64).sum(axis=1) - 1).max() <= 1e-6


def test_softmax_of_what_is_no_number() -> None:
    rows = np.zeros((5, 40), np.float32)
    rows[0, 7], rows[1, 0], rows[2, 39] = np.nan, np.nan, np.inf
    rows[3] = -np.inf
    rows[3, 5] = 1
    ours = result([given(0, rows), operation("softmax", (0,), (0,))], 5)
    assert np.isnan(ours[:2]).all()
    assert np.isnan(ours[2, 39])
    assert ours[3, 5] == 1
    assert np.delete(ours[3], 5).max() < 1e-37
    assert (ours[4] == np.float32(1 / 40)).all()


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_softcap(cap: float, library: ctypes.CDLL) -> None:
    x = (RNG.standard_normal((9, 50)) * 10.0 ** np.arange(-4, 5)[:, None]).astype(np.float32)
    ours = checked("softcap", x, 3e-7, cap=cap)
    same_bits(ours, np.float32(cap) * mapped(library, "tanh_of", x / np.float32(cap)))


@pytest.mark.parametrize("name", ["rope", "rope_pairs"])
@pytest.mark.parametrize(("heads", "width", "dimensions"), [(1, 64, 64), (4, 80, 80), (3, 128, 64), (2, 20, 6)])
@pytest.mark.parametrize("first", [0, 1000])
def test_rope(name: str, heads: int, width: int, dimensions: int, first: int) -> None:
    x = RNG.standard_normal((first + 12, heads * width)).astype(np.float32)[-12:]
    operations = [given(0, x), operation(name, (0,), (0,), heads=heads, dimensions=dimensions, **PLAIN_ROPE)]
    program = bound(operations, native(2))
    sequence = program.sequence()
    if first:  # what came before
        run(program, operations, rows_of(first, sequence, tokens=[0] * first))
    ours = run(program, operations, rows_of(12, sequence, first=first, tokens=range(12)))
    turns = 10000.0 ** (-2 * np.arange(dimensions // 2) / dimensions)
    angle = (first + np.arange(12))[:, None, None] * turns
    exact = x.astype(np.float64).reshape(12, heads, width).copy()
    halves = name == "rope"
    one = slice(0, dimensions // 2) if halves else slice(0, dimensions, 2)
    two = slice(dimensions // 2, dimensions) if halves else slice(1, dimensions, 2)
    a, b = exact[..., one].copy(), exact[..., two].copy()
    exact[..., one], exact[..., two] = (
        a * np.cos(angle) - b * np.sin(angle),
        a * np.sin(angle) + b * np.cos(angle),
    )
    assert np.abs(ours.reshape(exact.shape) - exact).max() <= 4e-7 * np.abs(x).max()
    same_bits(ours, rotated_by_the_reference(name, x, heads, dimensions, first))


def rotated_by_the_reference(name: str, x: F32, heads: int, dimensions: int, first: int) -> F32:
    """One host table, two rounded products and a rounded sum: nothing is left to differ in."""
    constants = reference.PREPARED[name]({"heads": heads, "dimensions": dimensions, **PLAIN_ROPE})
    rows = rows_of(len(x), None, first=first)  # type: ignore[arg-type]
    ours: F32 = reference.OPERATIONS[name](x, rows=rows, **constants)
    return ours


def test_rope_is_not_afraid_of_the_table_growing_under_other_layers() -> None:
    """Programs share tables; what is bound first must see what a later run made longer."""
    x = RNG.standard_normal((1, 8)).astype(np.float32)
    turn = operation("rope", (0,), (0,), heads=1, dimensions=8, **PLAIN_ROPE)
    operations = [given(0, x), turn, operation("copy", (0,), (1,)), turn]
    program = bound(operations)
    sequence = program.sequence()
    outs = [run(program, operations, rows_of(1, sequence, first=at, tokens=[0])) for at in range(600)]
    again = run(bound(operations), operations, rows_of(600, program.sequence(), tokens=[0] * 600))
    same_bits(np.concatenate(outs), again)


@pytest.mark.parametrize(
    ("name", "constants"), [("add", {}), ("mul", {}), ("scale", {"factor": 0.1}), ("add_bias", {})]
)
@pytest.mark.parametrize("width", [1, 16, 33, 100])
def test_plain_arithmetic_has_the_reference_bits(name: str, constants: dict[str, Any], width: int) -> None:
    x, y = RNG.standard_normal((2, 9, width)).astype(np.float32)
    inputs = [given(0, x), given(1, y)]
    if name == "add_bias":
        constants = {"bias": y[0].copy()}
    two = name in ("add", "mul")
    step = operation(name, (0, 1) if two else (0,), (0,), **constants)
    ours = result([*inputs, step], 9, backend=native(3))
    same_bits(ours, reference.OPERATIONS[name](*((x, y) if two else (x,)), **constants))


def test_a_register_of_width_one_scales_the_row() -> None:
    x, y = RNG.standard_normal((9, 40)).astype(np.float32), RNG.standard_normal((9, 1)).astype(np.float32)
    same_bits(result([given(0, x), given(1, y), operation("mul", (0, 1), (0,))], 9, backend=native(3)), x * y)


def test_split_and_split_heads() -> None:
    x = RNG.standard_normal((9, 60)).astype(np.float32)
    for name, constants in (("split", {"widths": (10, 35, 15)}), ("split_heads", {"heads": 5, "widths": (10, 35, 15)})):
        operations = [given(0, x), operation(name, (0,), (1, 0, 2), **constants)]
        for slot, piece in zip((1, 0, 2), reference.OPERATIONS[name](x, **constants), strict=True):
            same_bits(result(operations, 9, slot, native(3)), piece)
