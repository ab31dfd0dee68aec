// One source for OpenCL C 1.2 and later, CUDA C++ (NVRTC) and HIP (hiprtc, clang -x hip). No system header is needed.
//
// C99 without recursion or pointers to functions; pointers say GLOBAL or LOCAL; SHARED stands at the start of a kernel
// and has a constant length; floats end in f, for many devices have no double; a barrier is reached by all items of a
// group or by none. Contraction is off and every FMA is written: the bits do not depend on the compiler.
#if defined(__OPENCL_C_VERSION__) || defined(__OPENCL_VERSION__)
#pragma OPENCL FP_CONTRACT OFF
#define KERNEL(items) __kernel __attribute__((reqd_work_group_size(items, 1, 1)))
#define DEVICE static inline
#define GLOBAL __global
#define LOCAL __local
#define CONSTANT __constant
#define SHARED(T, name, length) __local T name[length]
#define RESTRICT restrict
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#define GROUP ((int)get_group_id(0))
#define GROUP_Y ((int)get_group_id(1))
#define ITEM ((int)get_local_id(0))
#define FMA(a, b, c) fma((float)(a), (float)(b), (float)(c))
#define BITS(f) as_uint((float)(f))
#define FLOAT(u) as_float((u32)(u))
#define FAST_SQRT(x) sqrt((float)(x))
#define HALF_AT(p, i) vload_half((i), (GLOBAL const half *)(p)) // core OpenCL: no extension
typedef uchar u8;
typedef char i8;
typedef ushort u16;
typedef uint u32;
typedef long i64;
#else
#if defined(SWARM_HIP_BARE) // clang -x hip -nogpuinc: there is no hip_runtime.h
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define GROUP ((int)__builtin_amdgcn_workgroup_id_x())
#define GROUP_Y ((int)__builtin_amdgcn_workgroup_id_y())
#define ITEM ((int)__builtin_amdgcn_workitem_id_x())
#define BARRIER()                                          \
  do {                                                     \
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \
    __builtin_amdgcn_s_barrier();                          \
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); \
  } while (0)
#define ITEMS(n) __attribute__((amdgpu_flat_work_group_size(n, n)))
#define FMA(a, b, c) __builtin_fmaf((a), (b), (c))
#define FAST_SQRT(x) __builtin_sqrtf(x)
#else
#define GROUP ((int)blockIdx.x)
#define GROUP_Y ((int)blockIdx.y)
#define ITEM ((int)threadIdx.x)
#define BARRIER() __syncthreads()
#define ITEMS(n) __launch_bounds__(n)
#define FMA(a, b, c) fmaf((a), (b), (c))
#define FAST_SQRT(x) sqrtf(x)
#endif
#define KERNEL(items) extern "C" __global__ ITEMS(items)
#define DEVICE static __device__ inline
#define GLOBAL
#define LOCAL
#define CONSTANT static __device__ const
#define SHARED(T, name, length) __shared__ T name[length]
#define RESTRICT __restrict__
typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
DEVICE u32 swarm_bits(float f) {
  union {
    float f;
    u32 u;
  } c;
  c.f = f;
  return c.u;
}
DEVICE float swarm_float(u32 u) {
  union {
    float f;
    u32 u;
  } c;
  c.u = u;
  return c.f;
}
#define BITS(f) swarm_bits(f)
#define FLOAT(u) swarm_float(u)
DEVICE float swarm_half(u16 h) {
#if defined(__CUDA_ARCH__)
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
#else
  union {
    u16 u;
    _Float16 f;
  } c;
  c.u = h;
  return (float)c.f;
#endif
}
#define HALF_AT(p, i) swarm_half(((const u16 *)(p))[i])
#endif
#define LANES 32
