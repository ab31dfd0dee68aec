// Inputs from integers alone, so that no float depends on the machine, and digests of results.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static int failures;

// ---- memory of one case, let go of at its end. A page behind it that nobody may touch shows what reads too far.

typedef struct {
  void *start;
  size_t bytes;
} holding;
static holding held[4096];
static int held_count;
static void no_memory(void) {
  fprintf(stderr, "no memory\n");
  exit(2);
}
// Ends with its page where `align` divides `bytes`; full of nonsense
static void *room_aligned(size_t bytes, size_t align) {
  if (held_count == sizeof held / sizeof *held) no_memory();
#if defined(__SANITIZE_ADDRESS__) // which sees a single byte, if it is malloc's
  void *start = malloc(bytes + align), *p = (char *)start + (align - (uintptr_t)start % align) % align;
  if (!start) no_memory();
  held[held_count++] = (holding){start, 0};
#else
  size_t page = (size_t)sysconf(_SC_PAGESIZE), filled = (bytes + align - 1) / align * align,
         whole = (filled + page - 1) / page * page;
  char *start = mmap(0, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(start + whole, page, PROT_NONE)) no_memory();
  held[held_count++] = (holding){start, whole + page};
  void *p = start + whole - filled;
#endif
  return memset(p, 0xAA, bytes);
}
static void *room(size_t bytes) { return room_aligned(bytes, 64); }
static float *floats(int64_t n) { return room(sizeof(float) * (size_t)n); }
static void let_go(void) {
  while (held_count) {
    holding h = held[--held_count];
    if (h.bytes)
      munmap(h.start, h.bytes);
    else
      free(h.start);
  }
}

// ---- random numbers (SplitMix64), begun anew from a name, so that a case depends on no other

static uint64_t random_state;
static uint64_t fnv(uint64_t hash, const void *data, size_t n) {
  for (size_t i = 0; i < n; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 1099511628211u;
  return hash;
}
#define FNV_START 14695981039346656037u
static void seed(const char *name) { random_state = fnv(FNV_START, name, strlen(name)); }
static uint32_t random_bits(void) {
  uint64_t z = random_state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return (uint32_t)((z ^ z >> 31) >> 32);
}
static int random_below(int n) { return (int)((uint64_t)random_bits() * (uint64_t)n >> 32); }
// +- 2^low to 2^high
static float random_float(int low, int high) {
  uint32_t u = random_bits();
  return bits_to_float((u & 0x807FFFFFu) | (uint32_t)(127 + low + random_below(high - low)) << 23);
}
// Activations: mostly of a size, some zeros of either sign, some subnormal
static float *random_floats(int64_t n, int low, int high) {
  float *x = floats(n);
  for (int64_t i = 0; i < n; i++) {
    int kind = random_below(64);
    x[i] = kind > 1 ? random_float(low, high) : bits_to_float(random_bits() & (kind ? 0x807FFFFFu : 0x80000000u));
  }
  return x;
}
// An F16 of 2^-10 to 2^-3, either sign; now and then zero or subnormal
static void random_half(uint8_t *p) {
  uint32_t u = random_bits(), exponent = random_below(16) ? 5 + (u >> 16 & 7) : 0;
  uint16_t h = (uint16_t)((u & 0x83FF) | exponent << 10);
  memcpy(p, &h, 2);
}
// Blocks of random codes with scales of a sane size
static uint8_t *random_blocks(int type, int64_t blocks, int bytes) {
  uint8_t *data = room_aligned((size_t)(blocks * bytes), 1); // as at the end of a file
  for (int64_t b = 0; b < blocks; b++) {
    uint8_t *p = data + b * bytes;
    for (int i = 0; i < bytes; i++) p[i] = (uint8_t)random_bits();
    switch (type) {
    case F32:
      for (int i = 0; i < bytes; i += 4) memcpy(p + i, &(float){random_float(-8, 1)}, 4);
      break;
    case F16:
      for (int i = 0; i < bytes; i += 2) random_half(p + i);
      break;
    case BF16:
      for (int i = 0; i < bytes; i += 2)
        memcpy(p + i, &(uint16_t){(uint16_t)(float_to_bits(random_float(-8, 1)) >> 16)}, 2);
      break;
    case Q4_1:
    case Q5_1:
    case Q4_K:
    case Q5_K: random_half(p + 2); // fall through
    case Q4_0:
    case Q5_0:
    case Q8_0:
    case IQ4_NL:
    case IQ4_XS: random_half(p); break;
    case Q2_K: random_half(p + 80), random_half(p + 82); break;
    case Q3_K: random_half(p + 108); break;
    case Q6_K: random_half(p + 208); break;
    case MXFP4: *p = (uint8_t)(random_below(16) ? 118 + random_below(8) : random_below(2)); break; // 0 and 1: subnormal
    }
  }
  return data;
}
static matrix random_matrix(int type, int rows, int cols) {
  int weights = 0, bytes = 0;
  switch (type) {
#define X(T, WEIGHTS, BYTES_) \
  case T: weights = WEIGHTS, bytes = BYTES_; break;
    FOR_EACH_TYPE(X)
#undef X
  }
  if (type == F32 || type == F16 || type == BF16) bytes /= weights, weights = 1;
  return (matrix){random_blocks(type, (int64_t)rows * (cols / weights), bytes), type, rows, cols,
                  cols / weights * bytes};
}

// ---- results

static char case_name[128];
static void name_case(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(case_name, sizeof case_name, format, list);
  va_end(list);
  seed(case_name);
}
static void print_digest(const char *name, uint64_t hash) { printf("%016llx  %s\n", (unsigned long long)hash, name); }
// A line for n results. What is no number counts as one: processors differ in what they put in it.
static void say_any(const char *name, const float *x, int64_t n) {
  uint64_t hash = FNV_START;
  for (int64_t i = 0; i < n; i++) {
    uint32_t u = x[i] == x[i] ? float_to_bits(x[i]) : 0x7FC00000u;
    hash = fnv(hash, (uint8_t[]){(uint8_t)u, (uint8_t)(u >> 8), (uint8_t)(u >> 16), (uint8_t)(u >> 24)}, 4);
  }
  print_digest(name, hash);
}
static void say(const char *name, const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if ((float_to_bits(x[i]) & 0x7F800000u) == 0x7F800000u) {
      fprintf(stderr, "%s: element %lld is not finite\n", name, (long long)i);
      failures++;
      break;
    }
  say_any(name, x, n);
}
// Results have to be the bits of `want`; `what` says where those come from.
static void must(const char *name, const char *what, const float *got, const float *want, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (float_to_bits(got[i]) != float_to_bits(want[i]) && (got[i] == got[i] || want[i] == want[i])) {
      fprintf(stderr, "%s: element %lld is %a, %s gives %a\n", name, (long long)i, (double)got[i], what,
              (double)want[i]);
      failures++;
      return;
    }
}
// A case's results are about right: their relative L2 distance from what they should be about is at most `bar`
static double apart, whole;
static void about(const float *got, const float *want, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    apart += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]),
        whole += (double)want[i] * (double)want[i];
}
static void must_be_near(const char *name, double bar) {
  if (!(apart <= bar * bar * whole)) {
    fprintf(stderr, "%s: a relative L2 distance of %.3g\n", name, sqrt(apart / whole));
    failures++;
  }
  apart = whole = 0;
}
