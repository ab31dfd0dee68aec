// Products of a quantised matrix and rows, in the canonical order: one row straight from the blocks; several rows
// through a tile of weights that is dequantised once.
#pragma once
#include "formats.h"

typedef struct {
  const uint8_t *data;
  int32_t type, rows, cols;
  int32_t row_bytes;
} matrix;

INLINE int filled(int n) { return (n + LANES - 1) / LANES * LANES; } // a row's values with the zeros behind them

// ---- one row of weights by one row of activations, and one row of weights as F32

#define X(T, WEIGHTS, BYTES_)                                                                        \
  static float dot_##T(const uint8_t *p, const float *x, int k) {                                    \
    V acc[NV], w[NV];                                                                                \
    float s[LANES] __attribute__((aligned(64)));                                                     \
    for (int i = 0; i < NV; i++) acc[i] = v_all(0);                                                  \
    for (; k >= WEIGHTS; k -= WEIGHTS, p += BYTES_, x += WEIGHTS) {                                  \
      for (int line = 0; line < BYTES_; line += 64) AHEAD(p + line);                                 \
      T##_open(p, s);                                                                                \
      _Pragma("GCC unroll 8") for (int sub = 0; sub < WEIGHTS / LANES; sub++) {                      \
        T##_take(p, sub, s, w);                                                                      \
        for (int i = 0; i < NV; i++) acc[i] = v_fma(w[i], v_load(x + sub * LANES + i * VL), acc[i]); \
      }                                                                                              \
    }                                                                                                \
    if (WEIGHTS == LANES && k) {                                                                     \
      uint8_t rest[LANES * 4] = {0};                                                                 \
      float y[LANES] = {0};                                                                          \
      memcpy(rest, p, (size_t)(k * BYTES_ / LANES));                                                 \
      memcpy(y, x, (size_t)k * sizeof(float));                                                       \
      T##_take(rest, 0, s, w);                                                                       \
      for (int i = 0; i < NV; i++) acc[i] = v_fma(w[i], v_load(y + i * VL), acc[i]);                 \
    }                                                                                                \
    return v_tree(acc);                                                                              \
  }                                                                                                  \
  static void fill_##T(const uint8_t *p, float *out, int k) {                                        \
    V w[NV];                                                                                         \
    float s[LANES] __attribute__((aligned(64)));                                                     \
    for (; k >= WEIGHTS; k -= WEIGHTS, p += BYTES_, out += WEIGHTS) {                                \
      for (int line = 0; line < BYTES_; line += 64) AHEAD(p + line);                                 \
      T##_open(p, s);                                                                                \
      _Pragma("GCC unroll 8") for (int sub = 0; sub < WEIGHTS / LANES; sub++) {                      \
        T##_take(p, sub, s, w);                                                                      \
        for (int i = 0; i < NV; i++) v_store(out + sub * LANES + i * VL, w[i]);                      \
      }                                                                                              \
    }                                                                                                \
    if (WEIGHTS == LANES && k) {                                                                     \
      uint8_t rest[LANES * 4] = {0};                                                                 \
      memcpy(rest, p, (size_t)(k * BYTES_ / LANES));                                                 \
      T##_take(rest, 0, s, w);                                                                       \
      for (int i = 0; i < NV; i++) v_store(out + i * VL, w[i]);                                      \
    }                                                                                                \
  }
FOR_EACH_TYPE(X)
#undef X

typedef float dot_function(const uint8_t *row, const float *x, int k);
typedef void fill_function(const uint8_t *row, float *out, int k); // fills up with zeros to whole lanes
#define X(T, WEIGHTS, BYTES_) [T] = dot_##T,
static dot_function *const dot_of[] = {FOR_EACH_TYPE(X)};
#undef X
#define X(T, WEIGHTS, BYTES_) [T] = fill_##T,
static fill_function *const fill_of[] = {FOR_EACH_TYPE(X)};
#undef X

// ---- tiles: 4 rows of weights by up to MOST_X rows of activations at a time, one register of lanes a pass

#define GROUP 4
#if defined(LANES_AVX512) || defined(LANES_NEON)
#define MOST_X 6
#else
#define MOST_X 2
#endif
#ifndef TILE_GROUPS
#define TILE_GROUPS 6
#endif
#ifndef K_BLOCK
#define K_BLOCK 1024 // values at a time: so many of 6 + 4 rows stay in the first level of cache
#endif
#define TILE_ROWS (TILE_GROUPS * GROUP)
#define MOST_COLUMNS 512 // rows of activations that one tile is used for

// One pass: VL lanes of the sums of 4 x n products over k (whole lanes) more values.
INLINE void pass(const float *w, int stride, const float *const *x, int n, int k, int is_first, V acc[GROUP][MOST_X]) {
  V a[GROUP][MOST_X];
  for (int r = 0; r < GROUP; r++)
    for (int c = 0; c < n; c++) a[r][c] = is_first ? v_all(0) : acc[r][c];
  for (int i = 0; i < k; i += LANES) {
    V v[GROUP];
    for (int r = 0; r < GROUP; r++) v[r] = v_load(w + r * stride + i);
    for (int c = 0; c < n; c++) {
      V y = v_load(x[c] + i);
      for (int r = 0; r < GROUP; r++) a[r][c] = v_fma(v[r], y, a[r][c]);
    }
  }
  for (int r = 0; r < GROUP; r++)
    for (int c = 0; c < n; c++) acc[r][c] = a[r][c];
}
// out[c][r] for `groups` groups of 4 rows of a tile w[rows][stride] by n rows x[c] of k (whole lanes) values each
INLINE void block(const float *w, int stride, int groups, const float *const *x, int n, int k, float *const *out) {
  V acc[TILE_GROUPS][NV][GROUP][MOST_X];
  const float *at[MOST_X];
  for (int from = 0; from < k; from += K_BLOCK)
    for (int i = 0; i < NV; i++) {
      int some = k - from < K_BLOCK ? k - from : K_BLOCK;
      for (int c = 0; c < n; c++) at[c] = x[c] + from + i * VL;
      for (int g = 0; g < groups; g++)
        pass(w + g * GROUP * stride + from + i * VL, stride, at, n, some, from == 0, acc[g][i]);
    }
  for (int g = 0; g < groups; g++)
    for (int c = 0; c < n; c++) {
#if defined(LANES_AVX512)
      V s[GROUP];
      for (int r = 0; r < GROUP; r++) s[r] = v_add(acc[g][0][r][c], acc[g][1][r][c]);
      _mm_storeu_ps(out[c] + g * GROUP, v_trees4(s[0], s[1], s[2], s[3]));
#else
      for (int r = 0; r < GROUP; r++) {
        V s[NV];
        for (int i = 0; i < NV; i++) s[i] = acc[g][i][r][c];
        out[c][g * GROUP + r] = v_tree(s);
      }
#endif
    }
}
static void blocks(const float *w, int stride, int groups, const float *const *x, int n, int k, float *const *out) {
  switch (n) {
#define CASE(N) \
  case N: block(w, stride, groups, x, N, k, out); break;
    CASE(1)
    CASE(2)
#if MOST_X > 2
    CASE(3)
    CASE(4)
    CASE(5)
    CASE(6)
#endif
#undef CASE
  }
}
// Products of a tile of F32 rows w[rows][stride], at most TILE_ROWS, with n rows x[c] of k values (both filled up to
// whole lanes): out[c][r]
static void tile_products(const float *w, int stride, int rows, const float *const *x, int n, int k,
                          float *const *out) {
  int whole = rows / GROUP * GROUP;
  for (int c = 0, some; c < n; c += some) {
    // seven as 4 + 3 rather than 6 + 1: a narrow block costs as many loads
    some = n - c <= MOST_X ? n - c : n - c < 2 * MOST_X ? (n - c + 1) / 2 : MOST_X;
    if (whole) blocks(w, stride, whole / GROUP, x + c, some, filled(k), out + c);
    for (int r = whole; r < rows; r++)
      for (int i = 0; i < some; i++)
        out[c + i][r] = dot_F32((const uint8_t *)(w + (size_t)r * (size_t)stride), x[c + i], filled(k));
  }
}

INLINE int tile_stride(int cols) {
  return filled(cols) + 16;
} // rows that are powers of two apart would share cache sets

// out[c][r] for rows `from` to `to` of a matrix by n rows x[c], n at most MOST_COLUMNS. A single x[c] may end where the
// row ends; several have to be filled up to whole lanes. `tile` has room for TILE_ROWS * tile_stride(cols) floats.
static void products(const matrix *m, int from, int to, const float *const *x, int n, float *const *out, float *tile) {
  if (n == 1) {
    dot_function *dot = dot_of[m->type];
    for (int r = from; r < to; r++) out[0][r] = dot(m->data + (size_t)r * (size_t)m->row_bytes, x[0], m->cols);
    return;
  }
  fill_function *fill = fill_of[m->type];
  int stride = tile_stride(m->cols);
  float *at[MOST_COLUMNS];
  for (int r = from; r < to; r += TILE_ROWS) {
    int rows = to - r < TILE_ROWS ? to - r : TILE_ROWS;
    for (int i = 0; i < rows; i++)
      fill(m->data + (size_t)(r + i) * (size_t)m->row_bytes, tile + (size_t)i * (size_t)stride, m->cols);
    for (int c = 0; c < n; c++) at[c] = out[c] + r;
    tile_products(tile, stride, rows, x, n, m->cols, at);
  }
}
