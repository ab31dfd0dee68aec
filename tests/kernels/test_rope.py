"""RoPE's table against an arbitrary-precision computation, and the scalings against their formulas."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from typing import Any

import numpy as np
import pytest

from kernels import reference
from kernels.errors import KernelError
from kernels.rope import RopeTable, cos_sin, frequencies, magnitude
from kernels.state import Rows, Sequence

PLAIN: dict[str, Any] = {
    "dimensions": 8,
    "base": 10000.0,
    "factor": 1.0,
    "scaling": "linear",
    "original_context": 4096.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def exact_cos_sin(angle: float) -> tuple[float, float]:
    """cos and sin by their series, with 60 digits, of an angle brought near zero with 60 digits of pi."""
    getcontext().prec = 60
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    x = Decimal(angle) % (2 * pi)
    cos, sin, term, n = Decimal(1), x, Decimal(1), 0
    term_cos, term_sin = Decimal(1), x
    for n in range(1, 60):
        term_cos *= -x * x / ((2 * n - 1) * (2 * n))
        term_sin *= -x * x / ((2 * n) * (2 * n + 1))
        cos, sin = cos + term_cos, sin + term_sin
    assert term
    return float(cos), float(sin)


@pytest.mark.parametrize(
    "angle", [0.0, 1e-9, 0.5, 0.785398, 0.7854, 1.5707963, 3.1415926, 100.25, 4095.5, 131071.0, 1e6]
)
def test_cos_and_sin(angle: float) -> None:
    cos, sin = cos_sin(np.array([angle]))
    exact = exact_cos_sin(angle)
    assert abs(cos[0] - exact[0]) <= 4e-16
    assert abs(sin[0] - exact[1]) <= 4e-16


def test_plain_frequencies() -> None:
    turns = frequencies(**PLAIN)
    assert np.allclose(turns, [10000 ** (-2 * i / 8) for i in range(4)], rtol=1e-15)
    assert turns[0] == 1


def test_linear_scaling_and_none() -> None:
    plain = frequencies(**PLAIN)
    assert np.array_equal(frequencies(**PLAIN | {"factor": 8.0}), plain / 8)
    assert np.array_equal(frequencies(**PLAIN | {"factor": 8.0, "scaling": "none"}), plain)


def test_frequency_factors_divide() -> None:
    factors = np.array([1, 2, 4, 8], np.float32)
    assert np.array_equal(frequencies(**PLAIN, freqs=factors), frequencies(**PLAIN) / factors)


def test_yarn() -> None:
    n, base, factor, context = 64, 150000.0, 32.0, 4096.0

    def c(rotations: float) -> float:
        return n * math.log(context / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = max(0, math.floor(c(32))), min(n - 1, math.ceil(c(1)))
    exact = []
    for i in range(n // 2):
        keep = 1 - min(max((i - low) / max(0.001, high - low), 0), 1)
        turn = base ** (-2 * i / n)
        exact.append(turn / factor * (1 - keep) + turn * keep)
    given = PLAIN | {"dimensions": n, "base": base, "factor": factor, "scaling": "yarn"}
    assert np.allclose(frequencies(**given), exact, rtol=1e-14)


def test_magnitude() -> None:
    given: dict[str, Any] = {"factor": 32.0, "scaling": "yarn", "log_multiplier": 0.0, "attn_factor": 1.0}
    assert magnitude(**given) == pytest.approx(1 + 0.1 * math.log(32), rel=1e-15)
    assert magnitude(**given | {"log_multiplier": 0.1}) == 1
    assert magnitude(**given | {"scaling": "linear"}) == 1
    assert magnitude(**given | {"scaling": "linear", "attn_factor": 0.5}) == 0.5


def rotate(name: str, x: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
    rows = Rows(np.zeros(1, np.int32), np.array([position]), [Sequence(())], np.arange(1))
    table = RopeTable(frequencies(**PLAIN), 1.0)
    return reference.OPERATIONS[name](x, rows=rows, heads=1, table=table)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "pairs"),
    [("rope", [(i, i + 4) for i in range(4)]), ("rope_pairs", [(2 * i, 2 * i + 1) for i in range(4)])],
)
def test_which_values_turn_together(name: str, pairs: list[tuple[int, int]]) -> None:
    x = np.arange(1, 11, dtype=np.float32)[None]  # the last two are beyond the 8 that rotate
    turned = rotate(name, x, 300)[0]
    assert np.array_equal(turned[8:], x[0, 8:])
    for i, (a, b) in enumerate(pairs):
        cos, sin = exact_cos_sin(300 * 10000 ** (-2 * i / 8))
        assert turned[a] == pytest.approx(x[0, a] * cos - x[0, b] * sin, abs=2e-6)
        assert turned[b] == pytest.approx(x[0, a] * sin + x[0, b] * cos, abs=2e-6)


def test_a_table_that_grows_keeps_its_values() -> None:
    table = RopeTable(frequencies(**PLAIN), 1.0)
    early = table.at(np.array([5, 200]))
    late = table.at(np.array([5, 200, 5000]))
    assert np.array_equal(early[0], late[0][:2])
    assert np.array_equal(early[1], late[1][:2])


@pytest.mark.parametrize(
    "wrong",
    [
        {"factor": 1e-30},
        {"freqs": np.zeros(4, np.float32)},
        {"freqs": np.full(4, np.nan, np.float32)},
        {"scaling": "yarn", "factor": 4.0, "original_context": 0.0},
    ],
)
def test_numbers_that_make_no_angles_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(KernelError):
        frequencies(**PLAIN | wrong)
