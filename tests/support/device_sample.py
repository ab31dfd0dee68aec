"""A small device source for the drivers' tests and the checks, with what kernels need: groups, local memory, barriers."""

from __future__ import annotations

import numpy as np

from kernels.interface import F32

WIDTH = 32  #: work items of a group

SOURCE = """
#if defined(__OPENCL_C_VERSION__)
#define KERNEL(wg) __kernel __attribute__((reqd_work_group_size(wg, 1, 1)))
#define GLOBAL __global
#define SHARED(T, n, len) __local T n[len]
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define GROUP_ID ((int)get_group_id(0))
#define GROUP_ID_Y ((int)get_group_id(1))
#define LOCAL_ID ((int)get_local_id(0))
#define FMAF(a, b, c) fma((float)(a), (float)(b), (float)(c))
#else
#if defined(SWARM_HIP_BARE)
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define BOUNDS(wg) __attribute__((amdgpu_flat_work_group_size(wg, wg)))
#define BARRIER() __builtin_amdgcn_s_barrier()
#define GROUP_ID ((int)__builtin_amdgcn_workgroup_id_x())
#define GROUP_ID_Y ((int)__builtin_amdgcn_workgroup_id_y())
#define LOCAL_ID ((int)__builtin_amdgcn_workitem_id_x())
#define FMAF(a, b, c) __builtin_fmaf(a, b, c)
#else
#define BOUNDS(wg) __launch_bounds__(wg)
#define BARRIER() __syncthreads()
#define GROUP_ID ((int)blockIdx.x)
#define GROUP_ID_Y ((int)blockIdx.y)
#define LOCAL_ID ((int)threadIdx.x)
#define FMAF(a, b, c) fmaf(a, b, c)
#endif
#define KERNEL(wg) extern "C" __global__ BOUNDS(wg)
#define GLOBAL
#define SHARED(T, n, len) __shared__ T n[len]
#endif

/* x [rows, columns] with its groups of WIDTH turned round, times a factor and OFFSET more. */
KERNEL(WIDTH) void turn(GLOBAL const float *x, GLOBAL float *y, int columns, float factor) {
  SHARED(float, part, WIDTH);
  int column = GROUP_ID * WIDTH + LOCAL_ID;
  if (column < columns) part[LOCAL_ID] = x[GROUP_ID_Y * columns + column];
  BARRIER();
  if (column < columns) y[GROUP_ID_Y * columns + column] = part[WIDTH - 1 - LOCAL_ID] * factor + OFFSET;
}

/* Of x [6, WIDTH]: products and sums that are rounded each, and at once; quotients; halves of what is in row 4 */
KERNEL(WIDTH) void rounding(GLOBAL const float *x, GLOBAL float *y) {
  float a = x[LOCAL_ID], b = x[WIDTH + LOCAL_ID], c = x[2 * WIDTH + LOCAL_ID];
  y[LOCAL_ID] = a * b + c;
  y[WIDTH + LOCAL_ID] = FMAF(a, b, c);
  y[2 * WIDTH + LOCAL_ID] = a / b;
  y[3 * WIDTH + LOCAL_ID] = x[4 * WIDTH + LOCAL_ID] * 0.5f;
#if defined(EXACT_DIVIDE)
  y[4 * WIDTH + LOCAL_ID] = EXACT_DIVIDE;
#else
  y[4 * WIDTH + LOCAL_ID] = 0.0f;
#endif
}
"""
DEFINES = {"WIDTH": str(WIDTH), "OFFSET": "(0.25f + 0.5f)"}

#: What a check must find: each text with the faulty one in its place.
NO_BARRIER = ("  BARRIER();\n", "")
NO_SEMICOLON = ("BARRIER();\n", "BARRIER()\n")
DOUBLE = ("* 0.5f;", "* 0.5;")
CAST_DOUBLE = ("* 0.5f;", "* (float)0.5;")
HALF = ("float a = x[LOCAL_ID],", "half h = 0; float a = x[LOCAL_ID] + h,")
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
