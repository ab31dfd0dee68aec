"""Quantised blocks to float32, one class a format, equal bit for bit to the `gguf` package's.

A class gets all blocks of a few rows at once, [blocks, bytes of a block] uint8, and fills float32 [blocks, values].
The order of roundings is ggml's: a block's scale becomes float32 first; what is exact in float32 has no order.
Legend: n blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .formats import FORMATS, GGMLType

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class Quant(ABC):
    """One format. A subclass names its type and is found by it."""

    by_type: ClassVar[dict[GGMLType, type[Quant]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        qtype: GGMLType = kwargs.pop("qtype")
        super().__init_subclass__(**kwargs)
        Quant.by_type[qtype] = cls

    @classmethod
    @abstractmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        """Write the values of blocks [n, bytes] to out [n, values]."""


def dequantise(type: GGMLType, data: U8) -> F32:  # noqa: A002
    """Rows of quantised bytes [rows, bytes of a row] as float32 [rows, values]; F32 rows are a view where possible."""
    if type is GGMLType.F32 and data.flags.c_contiguous and data.ctypes.data % 4 == 0:
        return data.view(np.float32)
    form = FORMATS[type]
    rows, size = data.shape
    values = size // form.nbytes * form.block
    blocks = np.ascontiguousarray(data).reshape(-1, form.nbytes)
    out = np.empty((len(blocks), form.block), np.float32)
    # Scales in foreign files may be infinite or not a number; then so are the values, without a word.
    with np.errstate(all="ignore"):
        Quant.by_type[type].fill(blocks, out)
    return out.reshape(rows, values)


def _half(blocks: U8, at: int) -> F32:
    """The F16 at a byte offset of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """Low halves of all bytes, then high halves, along the last axis: [..., b] to [..., 2b]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


class _F32(Quant, qtype=GGMLType.F32):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        out[:] = blocks.copy().view(np.float32)


class _F16(Quant, qtype=GGMLType.F16):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        out[:] = blocks.copy().view(np.float16)


class _BF16(Quant, qtype=GGMLType.BF16):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        np.left_shift(blocks.copy().view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


class _Q8_0(Quant, qtype=GGMLType.Q8_0):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


class _Q4_0(Quant, qtype=GGMLType.Q4_0):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        quants = _nibbles(blocks[:, 2:]).view(np.int8)
        quants -= np.int8(8)
        np.multiply(quants, _half(blocks, 0), out=out)


class _Q4_1(Quant, qtype=GGMLType.Q4_1):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        np.multiply(_nibbles(blocks[:, 4:]), _half(blocks, 0), out=out)
        out += _half(blocks, 2)


def _fifth_bits(packed: U8) -> U8:
    """Four bytes of bits a block, [n, 4], as 16 or 0 for each of 32 values, [n, 32]."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    bits <<= 4
    return bits


class _Q5_0(Quant, qtype=GGMLType.Q5_0):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        quants = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(np.int8)
        quants -= np.int8(16)
        np.multiply(quants, _half(blocks, 0), out=out)


class _Q5_1(Quant, qtype=GGMLType.Q5_1):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        np.multiply(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), out=out)
        out += _half(blocks, 2)


class _Q2_K(Quant, qtype=GGMLType.Q2_K):
    """Sixteen groups of 16 values with a 4-bit scale and a 4-bit minimum each."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        scale = _half(blocks, 80) * (blocks[:, :16] & 15)  # [n, 16]
        minimum = _half(blocks, 82) * (blocks[:, :16] >> 4)
        groups = out.reshape(-1, 16, 16)
        np.multiply(_two_bits(blocks[:, 16:80]).reshape(-1, 16, 16), scale[:, :, None], out=groups)
        groups -= minimum[:, :, None]


def _two_bits(packed: U8) -> U8:
    """64 bytes as 256 values [n, 2, 4, 32]: of each half's 32 bytes the lowest two bits, then the next two up."""
    pairs = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    pairs &= 3
    return pairs


class _Q3_K(Quant, qtype=GGMLType.Q3_K):
    """Sixteen groups of 16 values with a signed 6-bit scale each; an absent high bit takes 4 away."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        packed = blocks[:, 96:108]
        low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)  # [n, 16]
        high = (packed[:, None, 8:12] >> np.array([0, 2, 4, 6], np.uint8)[:, None]).reshape(-1, 16) & 3
        scale = (low | high << 4).view(np.int8) - np.int8(32)
        bits = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]  # [n, 8, 32]: bit i of every byte
        absent = (~bits & 1) << 2
        quants = (_two_bits(blocks[:, 32:96]).reshape(-1, 256) - absent.reshape(-1, 256)).view(np.int8)
        factor = _half(blocks, 108) * scale  # [n, 16]
        np.multiply(quants.reshape(-1, 16, 16), factor[:, :, None], out=out.reshape(-1, 16, 16))


def _six_bit_pairs(packed: U8) -> tuple[U8, U8]:
    """Twelve bytes as eight 6-bit scales and eight 6-bit minima, [n, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, minima


def _k_groups(blocks: U8, quants: U8, out: F32) -> None:
    """Eight groups of 32 values, each scaled and less its minimum: Q4_K and Q5_K."""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    groups = out.reshape(-1, 8, 32)
    np.multiply(quants, (_half(blocks, 0) * scales)[:, :, None], out=groups)
    groups -= (_half(blocks, 2) * minima)[:, :, None]


def _k_nibbles(packed: U8) -> U8:
    """128 bytes as eight groups: of each 32 bytes the low halves, then the high halves, [n, 8, 32]."""
    quants = np.empty((len(packed), 4, 2, 32), np.uint8)
    bytes32 = packed.reshape(-1, 4, 32)
    np.bitwise_and(bytes32, 15, out=quants[:, :, 0])
    np.right_shift(bytes32, 4, out=quants[:, :, 1])
    return quants.reshape(-1, 8, 32)


class _Q4_K(Quant, qtype=GGMLType.Q4_K):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _k_groups(blocks, _k_nibbles(blocks[:, 16:]), out)


class _Q5_K(Quant, qtype=GGMLType.Q5_K):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        quants = _k_nibbles(blocks[:, 48:])
        fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]  # [n, 8, 32]: bit i for group i
        fifth &= 1
        fifth <<= 4
        quants |= fifth
        _k_groups(blocks, quants, out)


class _Q6_K(Quant, qtype=GGMLType.Q6_K):
    """Sixteen groups of 16 values with a signed 8-bit scale each; 4 low and 2 high bits a value, less 32."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
        quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
        np.bitwise_and(low, 15, out=quants[:, :, :2])
        np.right_shift(low, 4, out=quants[:, :, 2:])
        for pair, shift in enumerate((4, 2, 0, 2)):
            bits = high << shift if pair < 2 else high >> (0 if pair == 2 else 2)
            quants[:, :, pair] |= bits & 48
        signed = quants.view(np.int8)
        signed -= np.int8(32)
        factor = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)  # [n, 16]
        np.multiply(signed.reshape(-1, 16, 16), factor[:, :, None], out=out.reshape(-1, 16, 16))


#: The sixteen values of the non-linear 4-bit formats.
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


class _IQ4_NL(Quant, qtype=GGMLType.IQ4_NL):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        np.multiply(_IQ4_VALUES[_nibbles(blocks[:, 2:])], _half(blocks, 0), out=out)


class _IQ4_XS(Quant, qtype=GGMLType.IQ4_XS):
    """Eight groups of 32 values with a 6-bit scale less 32 each: 4 low bits packed in pairs, 2 high bits in a word."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8) & 15
        word = blocks[:, 2:4].copy().view(np.uint16)
        high = (word >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3  # [n, 8]
        scale = (low | high << 4).view(np.int8) - np.int8(32)
        factor = _half(blocks, 0) * scale
        values = _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
        np.multiply(values, factor[:, :, None], out=out.reshape(-1, 8, 32))


#: Twice the E2M1 values: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; the exponent below is halved for it.
_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


class _MXFP4(Quant, qtype=GGMLType.MXFP4):
    """32 E2M1 values under one power of two, 2^(e - 128); the two smallest exponents are subnormal."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        e = blocks[:, :1].astype(np.uint32)
        bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << 23).astype(np.uint32)
        np.multiply(_MXFP4_VALUES[_nibbles(blocks[:, 1:])], bits.view(np.float32), out=out)
