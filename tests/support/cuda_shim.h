// Runs a kernel's CUDA text on a CPU: the work items of a group are fibers of one thread, which change at barriers.
// Groups run in turn; odd ones start their items from the last, so that a missing barrier changes the result.
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(n)
#define __syncthreads() shim::barrier()
#define _Float16 shim::Half // g++ before 13 has it in C alone

static inline uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
static inline int32_t __float_as_int(float x) { return __builtin_bit_cast(int32_t, x); }
static inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
static inline float __int_as_float(int32_t x) { return __builtin_bit_cast(float, x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }

struct ShimIndex {
  unsigned x, y, z;
};
static ShimIndex threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

// binary16, rounded to the nearest, ties to even.
struct Half {
  uint16_t bits;
  Half() = default;
  Half(float x) {
    uint32_t u = __float_as_uint(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000)
      bits = sign | 0x7e00 | (rest >> 13 & 0x3ff);
    else if (rest >= 0x477ff000)
      bits = sign | 0x7c00;
    else if (rest < 0x38800000) // subnormal: adding 0.5 leaves its units of 2^-24 in the last bits
      bits = sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000);
    else
      bits = sign | (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
  }
  operator float() const {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | rest << 13);
    if (rest < 0x400) return __uint_as_float(sign | __float_as_uint((float)rest * 0x1p-24f));
    return __uint_as_float(sign | ((rest << 13) + 0x38000000));
  }
};

enum { MOST = 1024, STACK = 64 << 10 };
enum State { READY, AT_BARRIER, DONE };
// What a launch ends with; see cuda_shim.py.
enum Result { OK, WRONG_ITEMS, DIVERGENT };

struct Fiber {
  jmp_buf at;
  ucontext_t begin;
  State state;
  bool started;
};

static Fiber fibers[MOST];
static Fiber *running;
static jmp_buf scheduler;
static ucontext_t ended;
static void (*body)(void *);
static void *body_argument;

static inline void leave(State state) {
  Fiber *self = running;
  ShimIndex mine = threadIdx;
  self->state = state;
  if (_setjmp(self->at) == 0) _longjmp(scheduler, 1);
  threadIdx = mine;
}

static inline void barrier() { leave(AT_BARRIER); }

// A fiber lives on for the next group: making one costs more than changing to one.
static void live() {
  for (;;) {
    threadIdx = {(unsigned)(running - fibers), 0, 0};
    body(body_argument);
    leave(DONE);
  }
}

static void step(Fiber *fiber) {
  running = fiber;
  if (_setjmp(scheduler)) return;
  if (fiber->started) _longjmp(fiber->at, 1);
  fiber->started = true;
  getcontext(&fiber->begin);
  fiber->begin.uc_stack.ss_sp = malloc(STACK);
  fiber->begin.uc_stack.ss_size = STACK;
  fiber->begin.uc_link = &ended;
  makecontext(&fiber->begin, live, 0);
  setcontext(&fiber->begin);
}

// A group up to its end. Divergent: some items are done while others wait at a barrier, for which no device has a
// result.
static Result group(int items, bool backwards) {
  for (int i = 0; i < items; i++) fibers[i].state = READY;
  for (;;) {
    int waiting = 0;
    for (int k = 0; k < items; k++) {
      Fiber *fiber = &fibers[backwards ? items - 1 - k : k];
      step(fiber);
      waiting += fiber->state == AT_BARRIER;
    }
    if (waiting == 0) return OK;
    if (waiting < items) {
      for (int i = 0; i < items; i++)
        fibers[i].started = false; // those at a barrier never go on; their stacks are lost
      return DIVERGENT;
    }
  }
}

template <class Body> static int grid(int x, int y, int items, int made_for, Body run) {
  if (items != made_for || items > MOST) return WRONG_ITEMS;
  body = [](void *p) { (*(Body *)p)(); };
  body_argument = &run;
  gridDim = {(unsigned)x, (unsigned)y, 1};
  blockDim = {(unsigned)items, 1, 1};
  for (int j = 0; j < y; j++)
    for (int i = 0; i < x; i++) {
      blockIdx = {(unsigned)i, (unsigned)j, 0};
      if (Result result = group(items, (i + j) & 1)) return result;
    }
  return OK;
}

template <class... A, size_t... I>
static int call(void (*kernel)(A...), int made_for, int x, int y, int items, void **args, std::index_sequence<I...>) {
  return grid(x, y, items, made_for, [=] { kernel(*(A *)args[I]...); });
}

template <class... A> static int launch(void (*kernel)(A...), int made_for, int x, int y, int items, void **args) {
  return call(kernel, made_for, x, y, items, args, std::index_sequence_for<A...>{});
}

template <class A> constexpr char kind() {
  if (std::is_pointer_v<A>) return 'p';
  if (std::is_same_v<A, float>) return 'f';
  if (std::is_integral_v<A> && sizeof(A) == 4) return 'i';
  return '?';
}

// The kinds of a kernel's arguments, one letter each.
template <class... A> static const char *kinds(void (*)(A...)) {
  static const char letters[] = {kind<A>()..., 0};
  return letters;
}

} // namespace shim

// One for each kernel, behind the source.
#define SHIM_KERNEL(name, made_for)                                         \
  extern "C" int shim_launch_##name(int x, int y, int items, void **args) { \
    return shim::launch(name, made_for, x, y, items, args);                 \
  }                                                                         \
  extern "C" const char *shim_kinds_##name() { return shim::kinds(name); }
