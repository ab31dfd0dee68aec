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
    """Rows of quantised bytes [rows, bytes of a row] as float32 [rows, values]; F32 rows are a view where possible.

    ValueError when the rows do not hold whole blocks.
    """
    form = FORMATS[type]
    rows, size = data.shape
    if size % form.nbytes:
        raise ValueError(f"rows of {size} bytes do not hold whole {type.name} blocks of {form.nbytes} bytes")
    if type is GGMLType.F32 and data.flags.c_contiguous and data.ctypes.data % 4 == 0:
        return data.view(np.float32)
    out = np.empty((rows * size // form.nbytes, form.block), np.float32)
    if len(out):
        blocks = np.ascontiguousarray(data).reshape(-1, form.nbytes)
        # Scales in foreign files may be infinite or not a number; then so are the values, without a word.
        with np.errstate(all="ignore"):
            Quant.by_type[type].fill(blocks, out)
    return out.reshape(rows, size // form.nbytes * form.block)


def _half(blocks: U8, at: int) -> F32:
    """The F16 at an even byte offset of each block, as float32 [n, 1]."""
    return blocks.view(np.float16)[:, at // 2 : at // 2 + 1].astype(np.float32)


def _part(blocks: U8, start: int, stop: int) -> U8:
    """Some bytes of every block in one run, [n, stop - start]. Each part is moved as one item, not byte by byte."""
    parts = np.ndarray(len(blocks), f"V{stop - start}", blocks, start, blocks.strides[:1])
    return parts.copy().view(np.uint8).reshape(len(blocks), stop - start)


def _fields(packed: U8, group: int, bits: int, up: int = 0) -> U8:
    """Split bytes into fields of `bits` bits, each moved `up` bits up: [n, b] to [n, b * 8 / bits].

    Of each `group` bytes come the lowest fields of all, then the next higher ones, and so on. Several bytes are shifted
    as one word (the mask takes away what came from the neighbour) and a group is moved as one item.
    """
    rows, width = packed.shape
    item, count = np.dtype((np.void, group)), 8 // bits
    words = packed.reshape(-1).view(f"<u{min(8, width & -width)}")
    mask = words.dtype.type(int.from_bytes(bytes([(1 << bits) - 1 << up]) * words.itemsize))
    fields = np.empty((packed.size // group, count), item)
    for i in range(count):
        down = i * bits - up  # negative: up
        shifted = words >> down if down >= 0 else words << -down
        fields[:, i] = (shifted & mask).view(item)
    return fields.view(np.uint8).reshape(rows, width * count)


def _scaled(quants: NDArray[Any], scale: F32, out: F32) -> None:
    """out = quants * scale, for out [n, values] and a scale for each of equal groups of a block [n, groups].

    A cast and a product are twice as fast as a product of mixed types; the integers are exact in float32.
    """
    out[:] = quants
    groups = out.reshape(*scale.shape, -1)
    groups *= scale[:, :, None]


def _less(minimum: F32, out: F32) -> None:
    """Take the minimum of each group [n, groups] from its values."""
    groups = out.reshape(*minimum.shape, -1)
    groups -= minimum[:, :, None]


def _signed(quants: U8, zero: int) -> NDArray[np.int8]:
    """Quants that are stored `zero` too high, in place."""
    signed = quants.view(np.int8)
    signed -= np.int8(zero)
    return signed


class _F32(Quant, qtype=GGMLType.F32):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        out[:] = blocks.view(np.float32)


class _F16(Quant, qtype=GGMLType.F16):
    """Widened by integers, twice as fast as numpy's cast: exponents are set right by one exact product."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        words = out.view(np.int32)
        words[:] = blocks.view(np.int16)  # the sign is extended to the left
        words <<= 13
        words &= ~(7 << 28)
        out *= np.float32(2.0**112)
        if max(out.max(initial=0), -out.min(initial=0)) >= 65536:  # infinite or not a number in F16
            out[:] = blocks.view(np.float16)


class _BF16(Quant, qtype=GGMLType.BF16):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


class _Q8_0(Quant, qtype=GGMLType.Q8_0):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _scaled(blocks[:, 2:].view(np.int8), _half(blocks, 0), out)


class _Q4_0(Quant, qtype=GGMLType.Q4_0):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _scaled(_signed(_fields(_part(blocks, 2, 18), 16, 4), 8), _half(blocks, 0), out)


class _Q4_1(Quant, qtype=GGMLType.Q4_1):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _scaled(_fields(_part(blocks, 4, 20), 16, 4), _half(blocks, 0), out)
        out += _half(blocks, 2)


def _five_bits(high: U8, low: U8) -> U8:
    """Values of five bits, [n, 32]: four bytes of fifth bits and 16 of lower halves a block."""
    quants = np.unpackbits(high, axis=1, bitorder="little")
    quants *= np.uint8(16)  # far faster than a shift of bytes
    quants |= _fields(low, 16, 4)
    return quants


class _Q5_0(Quant, qtype=GGMLType.Q5_0):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _scaled(_signed(_five_bits(_part(blocks, 2, 6), _part(blocks, 6, 22)), 16), _half(blocks, 0), out)


class _Q5_1(Quant, qtype=GGMLType.Q5_1):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _scaled(_five_bits(_part(blocks, 4, 8), _part(blocks, 8, 24)), _half(blocks, 0), out)
        out += _half(blocks, 2)


class _Q2_K(Quant, qtype=GGMLType.Q2_K):
    """Sixteen groups of 16 values with a 4-bit scale and a 4-bit minimum each."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _scaled(_fields(_part(blocks, 16, 80), 32, 2), _half(blocks, 80) * (blocks[:, :16] & 15), out)
        _less(_half(blocks, 82) * (blocks[:, :16] >> 4), out)


class _Q3_K(Quant, qtype=GGMLType.Q3_K):
    """Sixteen groups of 16 values with a signed 6-bit scale each; an absent high bit takes 4 away."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        scale = _fields(_part(blocks, 104, 108), 4, 2, up=4)
        scale |= _fields(_part(blocks, 96, 104), 8, 4)
        quants = _fields(_part(blocks, 0, 32), 32, 1, up=2)
        quants |= _fields(_part(blocks, 32, 96), 32, 2)
        _scaled(_signed(quants, 4), _half(blocks, 108) * _signed(scale, 32), out)


def _k_groups(blocks: U8, quants: U8, out: F32) -> None:
    """Eight groups of 32 values, each scaled and less its minimum: Q4_K and Q5_K.

    Twelve bytes behind d and dmin hold the 6-bit scales and minima, handled four at a time as the bytes of a word.
    """
    words = blocks.view("<u4")
    first, second, third = words[:, 1], words[:, 2], words[:, 3]
    six = np.empty((len(blocks), 4), "<u4")
    six[:, 0] = first & 0x3F3F3F3F
    six[:, 1] = (third & 0x0F0F0F0F) | (first >> 2 & 0x30303030)
    six[:, 2] = second & 0x3F3F3F3F
    six[:, 3] = (third >> 4 & 0x0F0F0F0F) | (second >> 2 & 0x30303030)
    factors = six.view(np.uint8)  # [n, 16]: eight scales, eight minima
    _scaled(quants, _half(blocks, 0) * factors[:, :8], out)
    _less(_half(blocks, 2) * factors[:, 8:], out)


class _Q4_K(Quant, qtype=GGMLType.Q4_K):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _k_groups(blocks, _fields(_part(blocks, 16, 144), 32, 4), out)


class _Q5_K(Quant, qtype=GGMLType.Q5_K):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        quants = _fields(_part(blocks, 16, 48), 32, 1, up=4)
        quants |= _fields(_part(blocks, 48, 176), 32, 4)
        _k_groups(blocks, quants, out)


class _Q6_K(Quant, qtype=GGMLType.Q6_K):
    """Sixteen groups of 16 values with a signed 8-bit scale each; 4 low and 2 high bits a value, less 32."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        quants = _fields(_part(blocks, 128, 192), 32, 2, up=4)
        quants |= _fields(_part(blocks, 0, 128), 64, 4)
        _scaled(_signed(quants, 32), _half(blocks, 208) * blocks[:, 192:208].view(np.int8), out)


def _looked_up(fields: U8, values: list[int]) -> NDArray[np.int8]:
    """Sixteen values by 4-bit fields. `bytes.translate` is the fastest look-up there is."""
    table = np.array(values, np.int8).tobytes().ljust(256)
    return np.frombuffer(fields.tobytes().translate(table), np.int8).reshape(fields.shape)


#: The sixteen values of the non-linear 4-bit formats.
_IQ4_VALUES = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


class _IQ4_NL(Quant, qtype=GGMLType.IQ4_NL):
    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        _scaled(_looked_up(_fields(_part(blocks, 2, 18), 16, 4), _IQ4_VALUES), _half(blocks, 0), out)


class _IQ4_XS(Quant, qtype=GGMLType.IQ4_XS):
    """Eight groups of 32 values with a 6-bit scale less 32 each: 4 low bits packed in pairs, 2 high bits in a word."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        scale = _fields(_part(blocks, 2, 4), 1, 2, up=4)
        scale |= _fields(_part(blocks, 4, 8), 1, 4)
        quants = _looked_up(_fields(_part(blocks, 8, 136), 16, 4), _IQ4_VALUES)
        _scaled(quants, _half(blocks, 0) * _signed(scale, 32), out)


#: Twice the E2M1 values: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; the exponent below is halved for it.
_MXFP4_VALUES = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


class _MXFP4(Quant, qtype=GGMLType.MXFP4):
    """32 E2M1 values under one power of two, 2^(e - 128); the two smallest exponents are subnormal."""

    @classmethod
    def fill(cls, blocks: U8, out: F32) -> None:
        e = blocks[:, :1].astype(np.uint32)
        bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << 23).astype(np.uint32)
        _scaled(_looked_up(_fields(_part(blocks, 1, 17), 16, 4), _MXFP4_VALUES), bits.view(np.float32), out)
