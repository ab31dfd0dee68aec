"""A small device source for the drivers' tests and the checks, with what kernels need: groups, local memory, barriers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kernels.device
from kernels.interface import F32

COMPAT = (Path(kernels.device.__file__).parent / "compat.h").read_text()
WIDTH = 32  #: work items of a group

SOURCE = (
    COMPAT
    + """
/* x [rows, columns] with its groups of WIDTH turned round, times a factor and OFFSET more. */
KERNEL(WIDTH) void turn(GLOBAL const float *x, GLOBAL float *y, int columns, float factor) {
  SHARED(float, part, WIDTH);
  int column = GROUP * WIDTH + ITEM;
  if (column < columns) part[ITEM] = x[GROUP_Y * columns + column];
  BARRIER();
  if (column < columns) y[GROUP_Y * columns + column] = part[WIDTH - 1 - ITEM] * factor + OFFSET;
}

/* Of x [6, WIDTH]: products and sums that are rounded each, and at once; quotients; halves of what is in row 4 */
KERNEL(WIDTH) void rounding(GLOBAL const float *x, GLOBAL float *y) {
  float a = x[ITEM], b = x[WIDTH + ITEM], c = x[2 * WIDTH + ITEM];
  y[ITEM] = a * b + c;
  y[WIDTH + ITEM] = FMA(a, b, c);
  y[2 * WIDTH + ITEM] = a / b;
  y[3 * WIDTH + ITEM] = x[4 * WIDTH + ITEM] * 0.5f;
#if defined(EXACT_DIVIDE)
  y[4 * WIDTH + ITEM] = EXACT_DIVIDE;
#else
  y[4 * WIDTH + ITEM] = 0.0f;
#endif
}
"""
)
DEFINES = {"WIDTH": str(WIDTH), "OFFSET": "(0.25f + 0.5f)"}

#: What a check must find: each text with the faulty one in its place.
NO_BARRIER = ("  BARRIER();\n", "")
NO_SEMICOLON = ("BARRIER();\n", "BARRIER()\n")
DOUBLE = ("* 0.5f;", "* 0.5;")
CAST_DOUBLE = ("* 0.5f;", "* (float)0.5;")
HALF = ("float a = x[ITEM],", "half h = 0; float a = x[ITEM] + h,")
BESIDE = ("if (column < columns) y", "if (column < columns + 64) y")


def with_fault(fault: tuple[str, str]) -> str:
    """The source with one fault."""
    right, wrong = fault
    assert right in SOURCE
    return SOURCE.replace(right, wrong)


def turned(x: F32, factor: float) -> F32:
    """What `turn` computes of x [rows, columns], columns a multiple of WIDTH."""
    groups = x.reshape(len(x), -1, WIDTH)[:, :, ::-1].reshape(x.shape)
    return groups * np.float32(factor) + np.float32(0.75)
