"""Weights and activations made of random bits: the same bytes from a seed whatever machine or version of numpy.

For what is measured or compared where no model is at hand. Values are of a model's size: scales near 1/sqrt(inputs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .formats import FORMATS, GGMLType
from .interface import F32, ExpertWeights
from .matrix import Matrix

#: Where a block's F16 numbers are, by type, and what each has to be for values of mean 0 and standard deviation 1.
SCALES: Mapping[GGMLType, tuple[tuple[int, float], ...]] = {
    GGMLType.Q4_0: ((0, 1 / 4.6),),
    GGMLType.Q4_1: ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    GGMLType.Q5_0: ((0, 1 / 9.2),),
    GGMLType.Q5_1: ((0, 1 / 9.2), (2, -15.5 / 9.2)),
    GGMLType.Q8_0: ((0, 1 / 74),),
    GGMLType.Q2_K: ((80, 1 / 14), (82, 1.5 / 14)),
    GGMLType.Q3_K: ((108, 1 / 43),),
    GGMLType.Q4_K: ((0, 1 / 256), (2, 7.5 / 256)),
    GGMLType.Q5_K: ((0, 1 / 522), (2, 15.5 / 522)),
    GGMLType.Q6_K: ((208, 1 / 1370),),
    GGMLType.IQ4_NL: ((0, 1 / 67),),
    GGMLType.IQ4_XS: ((0, 1 / 1235),),
}
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)

# Only `random_raw` is promised to give the same numbers for ever; what a Generator makes of them is not.


def stream(*seed: int | str) -> np.random.PCG64:
    """A source of random bits for numbers and words."""
    entropy = [n for part in seed for n in ([part] if isinstance(part, int) else part.encode())]
    return np.random.PCG64(np.random.SeedSequence(entropy))


def _bytes(bits: np.random.BitGenerator, count: int) -> NDArray[np.uint8]:
    words = bits.random_raw(-(-count // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:count]


def floats(bits: np.random.BitGenerator, *shape: int) -> F32:
    """Float32 of mean 0 and standard deviation 1, nearly normal: sums of four."""
    count = math.prod(shape)
    parts = _bytes(bits, 16 * count).view("<u4").reshape(4, count) >> 8
    sums = parts.astype(np.int64).sum(axis=0) - 4 * 2**23 + 2
    values: F32 = (sums * (math.sqrt(3) / 2**24)).astype(np.float32)
    return values.reshape(shape)


def matrix(bits: np.random.BitGenerator, type: GGMLType, rows: int, cols: int) -> Matrix:  # noqa: A002
    """A matrix [rows, cols] of any type. ValueError when a row is no whole blocks."""
    form = FORMATS[type]
    if type in FLOATS:
        values = floats(bits, rows, cols) / np.float32(math.sqrt(cols))
        if type is GGMLType.F16:
            data = values.astype("<f2").view(np.uint8)
        elif type is GGMLType.BF16:
            data = (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
        else:
            data = values.view(np.uint8)
        return Matrix.of(type, rows, cols, np.ascontiguousarray(data).reshape(-1))
    count = rows * (cols // form.block)
    blocks = _bytes(bits, count * form.nbytes).reshape(count, form.nbytes)
    for at, size in SCALES.get(type, ()):
        # 128 numbers around that size, some 64 steps (at most 6 %) above or below it.
        middle = int(np.float16(size / math.sqrt(cols)).view(np.uint16))
        halves = (blocks[:, at].astype("<u2") & 0x7F) + np.uint16(middle - 64)
        blocks[:, at : at + 2] = halves.astype("<u2").view(np.uint8).reshape(-1, 2)
    if type is GGMLType.MXFP4:
        # Four powers of two around one that suits codes of up to 12.
        blocks[:, 0] = int(125.5 - math.log2(cols) / 2) - 2 + blocks[:, 0] % 4
    return Matrix.of(type, rows, cols, blocks.reshape(-1))


def expert(
    bits: np.random.BitGenerator,
    type: GGMLType,  # noqa: A002
    width: int,
    hidden: int,
    *,
    activation: str = "silu",
) -> ExpertWeights:
    """An expert [width] -> [hidden] -> [width] of one type, without biases."""
    gate, up = (matrix(bits, type, hidden, width) for _ in range(2))
    return ExpertWeights(gate=gate, up=up, down=matrix(bits, type, width, hidden), activation=activation)
