"""Operations on the native backend as tests need them: inputs as F32 embeddings, weights of every type, programs of few steps.

Legend: T rows, W a register's width.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels import synthetic
from kernels.backends.native_cpu import NativeBackend
from kernels.formats import FORMATS, GGMLType
from kernels.interface import DenseBackend, Operation, Options, Program
from kernels.matrix import Matrix
from kernels.native import build
from kernels.state import Rows, Sequence
from kernels.synthetic import SCALES

F32 = NDArray[np.float32]

#: RoPE's constants without any scaling, but for dimensions and heads.
PLAIN_ROPE: Mapping[str, Any] = {
    "base": 10000.0,
    "factor": 1.0,
    "scaling": "none",
    "original_context": 0.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "log_multiplier": 0.0,
    "attn_factor": 1.0,
}
#: F16 that are easily got wrong: zeros, the smallest and the largest subnormal, the smallest normal, the largest.
SPECIAL_HALVES = np.array([0, 1, 0x3FF, 0x400, 0x7BFF, 0x8000, 0x8001, 0x83FF, 0x8400, 0xFBFF], np.uint16)
QUANTISED = [t for t in GGMLType if t not in (GGMLType.F32, GGMLType.F16, GGMLType.BF16)]


@functools.cache
def native(threads: int = 1, activations: str = "f32") -> NativeBackend:
    """The backend with so many threads; one for all tests."""
    return NativeBackend(Options(threads=threads, activations=activations))


def f32_matrix(values: F32) -> Matrix:
    """A matrix of F32."""
    values = np.ascontiguousarray(values, np.float32)
    return Matrix.of(GGMLType.F32, *values.shape, values.view(np.uint8).reshape(-1))


def random_blocks(type_: GGMLType, count: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks [count, bytes] of random codes and every kind of finite scale."""
    form = FORMATS[type_]
    data = random.integers(0, 256, (count, form.nbytes), dtype=np.uint8)
    if type_ in SCALES:
        for at, _ in SCALES[type_]:
            halves = random.integers(0, 0x7C00, count).astype(np.uint16) | random.choice([0, 0x8000], count).astype(
                "u2"
            )
            special = random.random(count) < 0.5
            halves[special] = random.choice(SPECIAL_HALVES, special.sum())
            data[:, at : at + 2] = halves.astype("<u2").view(np.uint8).reshape(-1, 2)
    elif type_ is GGMLType.MXFP4:
        data[:, 0] = random.choice([0, 1, 2, 3, 127, 128, 252, 253, 254, *random.integers(0, 255, 4)], count)
    else:  # a float: no exponent of ones
        ones = np.uint8(0x7C if type_ is GGMLType.F16 else 0x7F)
        data[:, -1] = np.where(data[:, -1] & ones == ones, data[:, -1] ^ 0x40, data[:, -1])
    return data


def weights(type_: GGMLType, rows: int, cols: int, random: np.random.Generator) -> Matrix:
    """A matrix whose values are of ordinary size: scales near 1/sqrt(cols), as in a model."""
    return synthetic.matrix(random.bit_generator, type_, rows, cols)


def operation(name: str, inputs: Seq[int], outputs: Seq[int], /, **constants: Any) -> Operation:
    """One operation; `layer`, `memory` and `on_weights` are taken out of the constants."""
    beside = {key: constants.pop(key) for key in ("layer", "memory", "on_weights") if key in constants}
    return Operation(name=name, inputs=tuple(inputs), outputs=tuple(outputs), constants=constants, **beside)


def given(slot: int, values: F32) -> Operation:
    """An embedding that puts row t of values [T, W] into a slot, where the token is t."""
    return operation("embed", (), (slot,), weight=f32_matrix(values))


def rows_of(
    count: int, sequence: Sequence, *, first: int = 0, wanted: Seq[int] | None = None, tokens: Seq[int] | None = None
) -> Rows:
    """Rows of one sequence at consecutive positions."""
    return Rows(
        np.arange(first, first + count, dtype=np.int32) if tokens is None else np.asarray(tokens, np.int32),
        np.arange(first, first + count, dtype=np.int64),
        [sequence] * count,
        np.arange(count) if wanted is None else np.asarray(wanted, np.intp),
    )


def bound(operations: Seq[Operation], backend: DenseBackend | None = None) -> Program:
    """A program of these operations, on the native backend with one thread unless another is given."""
    slots = 1 + max(slot for op in operations for slot in (*op.inputs, *op.outputs))
    return (backend or native()).program(operations, [1] * slots)


def run(program: Program, operations: Seq[Operation], rows: Rows, slot: int = 0) -> F32:
    """What a slot holds after all operations."""
    on_its_way = program.begin(rows)
    try:
        on_its_way.run(0, len(operations))
        return on_its_way.values(slot).copy()
    finally:
        on_its_way.close()


def result(operations: Seq[Operation], count: int, slot: int = 0, backend: DenseBackend | None = None) -> F32:
    """What a slot holds after a program on rows 0 to count of a new sequence."""
    program = bound(operations, backend)
    return run(program, operations, rows_of(count, program.sequence()), slot)


def same_bits(ours: F32, theirs: F32) -> None:
    """Both the same to the bit; any NaN is as good as another."""
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all(), f"{(~same).sum()} of {same.size} values differ, first at {np.argwhere(~same)[0]}"


@functools.cache
def compiled(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    """A C program over the kernels' headers, compiled as they are."""
    path = folder / f"{hashlib.sha256(repr((source, flags)).encode()).hexdigest()[:16]}.so"
    text = path.with_suffix(".c")
    text.write_text(source)
    command = [*build.compilers(os.environ)[0], *build.FLAGS, *build.cpu_flags(), *flags, f"-I{build.SOURCES}"]
    done = subprocess.run([*command, str(text), "-o", str(path), "-lm"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))


def mapped(library: ctypes.CDLL, name: str, x: F32) -> F32:
    """What a function `name(out, in, count)` of a library makes of each value."""
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(x)
    getattr(library, name)(ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(x.ctypes.data), ctypes.c_int32(x.size))
    return out


#: Functions of one value, each as `name_of(out, in, count)`.
FUNCTIONS = """
#include "functions.h"
#define MAP(NAME) \\
  __attribute__((visibility("default"))) void NAME##_of(float *out, const float *in, int n) { V_MAP(out, in, n, v_##NAME(a)); }
MAP(exp) MAP(sigmoid) MAP(silu) MAP(gelu) MAP(gelu_tanh) MAP(tanh) MAP(erf) MAP(relu)
"""
