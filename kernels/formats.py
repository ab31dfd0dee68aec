"""The tensor types of GGUF: ids, block sizes, and the names of those that are refused. A row for each type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class GGMLType(IntEnum):
    """Types that can be computed with, by ggml's ids."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39


@dataclass(frozen=True, slots=True)
class Format:
    """Values in a block, and the block's bytes."""

    block: int
    nbytes: int


FORMATS: Mapping[GGMLType, Format] = {
    GGMLType.F32: Format(1, 4),
    GGMLType.F16: Format(1, 2),
    GGMLType.BF16: Format(1, 2),
    GGMLType.Q4_0: Format(32, 18),  # d:2, quants:16
    GGMLType.Q4_1: Format(32, 20),  # d:2, m:2, quants:16
    GGMLType.Q5_0: Format(32, 22),  # d:2, high bits:4, quants:16
    GGMLType.Q5_1: Format(32, 24),  # d:2, m:2, high bits:4, quants:16
    GGMLType.Q8_0: Format(32, 34),  # d:2, quants:32
    GGMLType.Q2_K: Format(256, 84),  # scales:16, quants:64, d:2, dmin:2
    GGMLType.Q3_K: Format(256, 110),  # high bits:32, quants:64, scales:12, d:2
    GGMLType.Q4_K: Format(256, 144),  # d:2, dmin:2, scales:12, quants:128
    GGMLType.Q5_K: Format(256, 176),  # d:2, dmin:2, scales:12, high bits:32, quants:128
    GGMLType.Q6_K: Format(256, 210),  # low bits:128, high bits:64, scales:16, d:2
    GGMLType.IQ4_NL: Format(32, 18),  # d:2, quants:16
    GGMLType.IQ4_XS: Format(256, 136),  # d:2, high bits of scales:2, low bits:4, quants:128
    GGMLType.MXFP4: Format(32, 17),  # exponent:1, quants:16
}

#: Types that exist or once existed and are refused, so that the refusal can name them.
REFUSED: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}


def row_bytes(type: GGMLType, values: int) -> int:  # noqa: A002
    """Bytes of a row of `values` values. ValueError when they do not fill whole blocks."""
    form = FORMATS[type]
    if values % form.block:
        raise ValueError(f"row length {values} is no multiple of {type.name}'s block of {form.block} values")
    return values // form.block * form.nbytes
