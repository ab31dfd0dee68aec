"""RoPE's angles and their cos and sin: one host table for every device, computed in float64 by our own code.

Only additions and multiplications of float64 in a fixed order (and `decimal`, which is exact to the digits asked for)
decide a bit here, never a machine's libm: the table is the same on every host.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal

import numpy as np
from numpy.typing import NDArray

from .errors import KernelError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

MOST_TURN = 1000.0  #: radians a position; beyond what any model has, and well within what cos_sin can do
_DIGITS = Context(prec=40)
# pi/2 in three parts of at most 33 bits, so that n * part is exact for n below 2^20 (fdlibm's e_rem_pio2.c)
_PIO2 = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_TWO_OVER_PI = 6.36619772367581382433e-01
# minimax polynomials on [-pi/4, pi/4] (fdlibm's k_sin.c and k_cos.c), highest power first
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)


def _polynomial(z: F64, coefficients: tuple[float, ...]) -> F64:
    value = np.full_like(z, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * z + coefficient
    return value


def cos_sin(angle: F64) -> tuple[F64, F64]:
    """cos and sin of float64 angles below 2^20 quarter turns, within 1 ulp of float64 at usual sizes."""
    turns = np.rint(angle * _TWO_OVER_PI)
    rest = angle
    for part in _PIO2:
        rest = rest - turns * part
    z = rest * rest
    sin = rest + rest * z * _polynomial(z, _SIN)
    cos = 1.0 - 0.5 * z + z * z * _polynomial(z, _COS)
    quarter = turns.astype(np.int64) & 3
    swap = (quarter & 1).astype(bool)
    c, s = np.where(swap, sin, cos), np.where(swap, cos, sin)
    return np.where((quarter == 1) | (quarter == 2), -c, c), np.where(quarter >= 2, -s, s)


def frequencies(
    *,
    dimensions: int,
    base: float,
    factor: float,
    scaling: str,
    original_context: float,
    beta_fast: float,
    beta_slow: float,
    freqs: F32 | None = None,
) -> F64:
    """Radians a position turns each pair by, [dimensions / 2] float64.

    base^(-2i/n), divided by `freqs` where given; then "linear" divides by `factor`, and "yarn" blends the plain and the
    divided frequency by a ramp over the pairs, with llama.cpp's floor and ceil of its ends.
    """
    n = dimensions
    wide = Decimal(float(base))
    plain = np.array([float(_DIGITS.power(wide, Decimal(-2 * i) / n)) for i in range(n // 2)])
    if freqs is not None:
        with np.errstate(divide="ignore"):
            plain = plain / freqs.astype(np.float64)
    turns = _scaled(plain, n, base, factor, scaling, original_context, beta_fast, beta_slow)
    if not (np.abs(turns) <= MOST_TURN).all():
        raise KernelError(
            f"RoPE turns by more than {MOST_TURN:g} radians a position: base, factor or frequencies are wrong"
        )
    return turns


def _scaled(
    plain: F64,
    n: int,
    base: float,
    factor: float,
    scaling: str,
    original_context: float,
    beta_fast: float,
    beta_slow: float,
) -> F64:
    if factor == 1 or scaling == "none":
        return plain
    if scaling == "linear":
        return plain / factor
    pair = np.arange(n // 2, dtype=np.float64)
    low = max(0.0, math.floor(_correction(beta_fast, n, base, original_context)))
    high = min(n - 1.0, math.ceil(_correction(beta_slow, n, base, original_context)))
    keep = 1 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    return plain / factor * (1 - keep) + plain * keep


def _correction(rotations: float, n: int, base: float, context: float) -> float:
    """The pair that turns `rotations` times over the original context."""
    if context <= 0 or rotations <= 0 or base == 1:
        raise KernelError(
            f"yarn needs a context, betas above 0 and a base other than 1, not {context:g}, {rotations:g}"
        )
    turns = Decimal(float(context)) / (Decimal(float(rotations)) * 2 * Decimal(math.pi))
    return float(n * _DIGITS.ln(turns) / (2 * _DIGITS.ln(Decimal(float(base)))))


def magnitude(*, factor: float, scaling: str, log_multiplier: float, attn_factor: float) -> float:
    """What cos and sin are multiplied by: YaRN's 1 + 0.1 ln(factor) unless a log multiplier stands for it."""
    if scaling != "yarn" or factor == 1 or log_multiplier:
        return attn_factor
    return attn_factor * (1 + 0.1 * float(_DIGITS.ln(Decimal(float(factor)))))


class RopeTable:
    """cos and sin by position, [positions, dimensions / 2] float32, made as positions come up."""

    def __init__(self, turns: F64, scale: float) -> None:
        self._turns, self._scale = turns, scale
        self.cos: F32 = np.empty((0, len(turns)), np.float32)
        self.sin = self.cos

    @property
    def dimensions(self) -> int:
        """How many values of a head rotate."""
        return 2 * len(self._turns)

    def at(self, positions: NDArray[np.int64]) -> tuple[F32, F32]:
        """cos and sin of each position, two arrays [T, dimensions / 2]."""
        self.reserve(int(positions.max(initial=-1)) + 1)
        return self.cos[positions], self.sin[positions]

    def reserve(self, need: int) -> None:
        """Make the table for at least so many positions."""
        have = len(self.cos)
        if need > have:
            extent = max(need, 2 * have, 256)
            angle = np.arange(have, extent, dtype=np.float64)[:, None] * self._turns
            cos, sin = cos_sin(angle)
            self.cos = np.concatenate([self.cos, (cos * self._scale).astype(np.float32)])
            self.sin = np.concatenate([self.sin, (sin * self._scale).astype(np.float32)])
