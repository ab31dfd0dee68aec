// The i16 class: activations as 16-bit integers with one F32 scale for each block of 32.
//
// Four consecutive products of whole weights and whole activations are summed exactly (below 2^24, so that F32 holds
// the sum); group g of four goes to lane g mod 16 by FMA with the rounded product of the two scales; the sixteen lanes
// are added in halves. Minima go the same way in lanes of their own, added last: those of Q4_1 and Q5_1 against the
// sums of four activations, those of Q4_K and Q5_K against a block's (block b to lane b mod 8), those of Q2_K against
// sums of sixteen (lane c mod 16). A row that does not fill its last 64 values is filled up with zeros.
//
// A block's scale is its largest magnitude / 32512 (0 below 1e-30, no number where that is not finite), and an
// activation x times 1 / scale, rounded to the nearest, ties to even. Sums of four are made of integers where the CPU
// has instructions for it, else, of several rows at once, of F32, which holds them just as exactly.
#pragma once
#include "products.h"

#define CHUNK 64 // values that fill the sixteen lanes once
#define GROUPS 16

enum minima { NONE, OF_FOUR, OF_32, OF_16 };
INLINE int minima_of(int type) {
  return type == Q4_1 || type == Q5_1 ? OF_FOUR : type == Q4_K || type == Q5_K ? OF_32 : type == Q2_K ? OF_16 : NONE;
}
INLINE int is_integer_type(int type) { return type != F32 && type != F16 && type != BF16; }

#if defined(LANES_AVX512) && defined(__AVX512VNNI__)
#define WITH_VNNI
#endif

// A row of activations. Planes: x = 256 hi + lo. `spread` has element 4 g + j of a chunk at 16 j + g; with VNNI it
// holds pairs of 16-bit integers in its place, elements 4 g and 4 g + 2 of all groups, then 4 g + 1 and 4 g + 3.
typedef struct {
  int8_t *hi, *lo;
  int32_t *four;                            // exact sums of four
  float *scale;                             // of the block, for each group of four
  float *fours;                             // as `four`
  float *sum16, *sum32, *scale16, *scale32; // exact sums of sixteen and of a block, and the scales that go with them
  float *spread;
} quantised;

INLINE int chunked(int k) { return (k + CHUNK - 1) / CHUNK * CHUNK; }
INLINE size_t quantised_floats(int k) { // a whole number of cache lines
  size_t n = (size_t)chunked(k);
  return (n + 5 * (n / 4) + 2 * (n / 16) + 2 * (n / 32) + 4 * 16 + 31) / 32 * 32;
}
INLINE quantised quantised_at(float *p, int k) {
  size_t n = (size_t)chunked(k);
  quantised q;
  q.spread = p, p += n;
  q.hi = (int8_t *)p, p += n / 4;
  q.lo = (int8_t *)p, p += n / 4;
  q.four = (int32_t *)p, p += n / 4;
  q.scale = p, p += n / 4;
  q.fours = p, p += n / 4;
  q.sum16 = p, p += n / 16 + 16;
  q.scale16 = p, p += n / 16 + 16;
  q.sum32 = p, p += n / 32 + 16;
  q.scale32 = p;
  return q;
}
// A block's scale and its inverse, from the bits of its largest magnitude
INLINE float block_scale(uint32_t most, float *inverse) {
  float top = bits_to_float(most), scale = top / 32512.0f; // 127 x 256: hi stays below 128
  *inverse = 1.0f / scale;
  if (top < 1e-30f) *inverse = scale = 0;
  if (most >= 0x7F800000u) *inverse = 0, scale = top - top; // not finite: neither is any product
  return scale;
}
#define I16_TILE 16 // rows of weights in a tile
INLINE int i16_stride(int k) { return chunked(k) + 2 * (chunked(k) / 4) + 16; }

#if defined(WITH_VNNI)
#include "i16_avx512.h"
#else

// ---- any other CPU

INLINE void quantise_block(const float *x, int b, quantised *q) {
  uint32_t most = 0;
  int32_t v[LANES], sum[2] = {0, 0};
  int8_t hi[LANES], lo[LANES];
  for (int i = 0; i < LANES; i++) {
    uint32_t u = float_to_bits(x[i]) & 0x7FFFFFFFu;
    most = u > most ? u : most;
  }
  float inverse, scale = block_scale(most, &inverse), *spread = q->spread + b / 2 * CHUNK + b % 2 * 8;
  for (int i = 0; i < LANES; i++) v[i] = inverse ? (int32_t)(x[i] * inverse + 12582912.0f - 12582912.0f) : 0;
  for (int i = 0; i < LANES; i++) {
    hi[i] = (int8_t)((v[i] + 128) >> 8);
    lo[i] = (int8_t)(v[i] - 256 * hi[i]);
  }
  memcpy(q->hi + b * LANES, hi, LANES);
  memcpy(q->lo + b * LANES, lo, LANES);
  for (int i = 0; i < LANES; i++) spread[i % 4 * GROUPS + i / 4] = (float)v[i];
  for (int g = 0; g < 8; g++) {
    int32_t f = v[4 * g] + v[4 * g + 1] + v[4 * g + 2] + v[4 * g + 3];
    q->four[b * 8 + g] = f;
    q->fours[b * 8 + g] = (float)f;
    q->scale[b * 8 + g] = scale;
    sum[g / 4] += f;
  }
  q->sum16[b * 2] = (float)sum[0], q->sum16[b * 2 + 1] = (float)sum[1];
  q->scale16[b * 2] = q->scale16[b * 2 + 1] = scale;
  q->sum32[b] = (float)(sum[0] + sum[1]);
  q->scale32[b] = scale;
}
// lane[i] + sums[i] (m[i] s[i]) over n values into `lanes` lanes, and their tree
INLINE float minima_sum(const float *m, const float *s, const float *sums, int n, int lanes) {
  float lane[GROUPS] = {0};
  for (int i = 0; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; l++) lane[l] = __builtin_fmaf(sums[i + l], m[i + l] * s[i + l], lane[l]);
  return tree_of(lane, lanes);
}
// What the minima of one row of weights add. m: in the tile's own order, filled up with zeros to whole lanes
static float minima_part(int kind, const float *m, const quantised *q, int k) {
  switch (kind) {
  case OF_FOUR: return minima_sum(m, q->scale, q->fours, chunked(k) / 4, 16);
  case OF_32: return minima_sum(m, q->scale32, q->sum32, k / 32, 8); // k is a multiple of 256
  case OF_16: return minima_sum(m, q->scale16, q->sum16, k / 16, 16);
  }
  return 0;
}

// ---- a row of weights in a tile: whole weights in spread order, the scale of each group of four, the minima

INLINE void fill_block(const sub_block *s, int kind, int b, int n, float *out) {
  float *scale = out + n, *m = scale + n / 4;
  for (int i = 0; i < LANES; i++) out[b / 2 * CHUNK + i % 4 * GROUPS + b % 2 * 8 + i / 4] = (float)s->code[i];
  for (int g = 0; g < 8; g++) scale[b * 8 + g] = s->scale[g / 4];
  if (kind == OF_FOUR)
    for (int g = 0; g < 8; g++) m[b * 8 + g] = s->add[0];
  if (kind == OF_32) m[b] = s->add[0];
  if (kind == OF_16) m[b * 2] = s->add[0], m[b * 2 + 1] = s->add[1];
}
#define X(T, WEIGHTS, BYTES_)                                                   \
  static void spread_##T(const uint8_t *p, float *out, int k) {                 \
    int n = chunked(k), kind = minima_of(T);                                    \
    sub_block s;                                                                \
    for (int i = 0; i < k; i += WEIGHTS, p += BYTES_)                           \
      _Pragma("GCC unroll 8") for (int sub = 0; sub < WEIGHTS / LANES; sub++) { \
        T##_sub(p, sub, &s);                                                    \
        fill_block(&s, kind, i / LANES + sub, n, out);                          \
      }                                                                         \
    if (n > k) {                                                                \
      memset(&s, 0, sizeof s);                                                  \
      fill_block(&s, kind, k / LANES, n, out);                                  \
    }                                                                           \
  }
FOR_EACH_QUANT(X)
#undef X

// ---- tiles: 2 rows of weights by up to I16_X rows of activations

#define I16_ROWS 2
#if defined(LANES_AVX512) || defined(LANES_NEON)
#define I16_X 6
#else
#define I16_X 2
#endif
#define I16_V (GROUPS / VL > 0 ? GROUPS / VL : 1)

INLINE void i16_pass(const float *w, int stride, const quantised *x, int n, int length, int at,
                     V acc[I16_ROWS][I16_X]) {
  V a[I16_ROWS][I16_X];
  for (int r = 0; r < I16_ROWS; r++)
    for (int c = 0; c < n; c++) a[r][c] = v_all(0);
  for (int i = 0; i < length; i += CHUNK) {
    V v[I16_ROWS][4], s[I16_ROWS];
    for (int r = 0; r < I16_ROWS; r++) {
      for (int j = 0; j < 4; j++) v[r][j] = v_load(w + r * stride + i + j * GROUPS + at);
      s[r] = v_load(w + r * stride + length + i / 4 + at);
    }
    for (int c = 0; c < n; c++) {
      V y[4], scale = v_load(x[c].scale + i / 4 + at);
      for (int j = 0; j < 4; j++) y[j] = v_load(x[c].spread + i + j * GROUPS + at);
      for (int r = 0; r < I16_ROWS; r++) {
        V t = v_mul(v[r][0], y[0]);
        for (int j = 1; j < 4; j++) t = v_fma(v[r][j], y[j], t);
        a[r][c] = v_fma(t, v_mul(s[r], scale), a[r][c]);
      }
    }
  }
  for (int r = 0; r < I16_ROWS; r++)
    for (int c = 0; c < n; c++) acc[r][c] = a[r][c];
}
INLINE void i16_block(const float *w, int stride, int rows, int kind, const quantised *x, int n, int k,
                      float *const *out) {
  V acc[I16_V][I16_ROWS][I16_X];
  for (int i = 0; i < I16_V; i++) i16_pass(w, rows > 1 ? stride : 0, x, n, chunked(k), i * VL, acc[i]);
  for (int c = 0; c < n; c++)
    for (int r = 0; r < rows; r++) {
      float lane[GROUPS + VL];
      for (int i = 0; i < I16_V; i++) v_store(lane + i * VL, acc[i][r][c]);
      float sum = tree_of(lane, GROUPS);
      out[c][r] = kind == NONE ? sum : sum + minima_part(kind, w + r * stride + chunked(k) + chunked(k) / 4, x + c, k);
    }
}

// ---- one row of weights by one row of activations

#if defined(LANES_NEON) && defined(__ARM_FEATURE_DOTPROD)
INLINE void sums_of_four(const int8_t *w, const int8_t *hi, const int8_t *lo, int32_t *t) {
  for (int h = 0; h < 2; h++) {
    int8x16_t v = vld1q_s8(w + 16 * h);
    int32x4_t up = vdotq_s32(vdupq_n_s32(0), v, vld1q_s8(hi + 16 * h));
    vst1q_s32(t + 4 * h, vdotq_s32(vshlq_n_s32(up, 8), v, vld1q_s8(lo + 16 * h)));
  }
}
#elif defined(LANES_AVX2)
INLINE void sums_of_four(const int8_t *w, const int8_t *hi, const int8_t *lo, int32_t *t) {
  __m256i half[2];
  for (int h = 0; h < 2; h++) {
    __m256i up = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(hi + 16 * h)));
    __m256i x = _mm256_add_epi16(_mm256_slli_epi16(up, 8),
                                 _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(lo + 16 * h))));
    half[h] = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * h))), x);
  }
  // sums of two to sums of four: groups 0, 1, 4, 5, then 2, 3, 6, 7
  __m256i four = _mm256_permute4x64_epi64(_mm256_hadd_epi32(half[0], half[1]), 0xD8);
  _mm256_storeu_si256((__m256i *)t, four);
}
#else
INLINE void sums_of_four(const int8_t *w, const int8_t *hi, const int8_t *lo, int32_t *t) {
  for (int g = 0; g < 8; g++) {
    int32_t up = 0, down = 0;
    for (int j = 0; j < 4; j++) up += w[4 * g + j] * hi[4 * g + j], down += w[4 * g + j] * lo[4 * g + j];
    t[g] = up * 256 + down;
  }
}
#endif
#define X(T, WEIGHTS, BYTES_)                                                                                       \
  static float i16_dot_##T(const uint8_t *p, const quantised *q, int k) {                                           \
    float lane[GROUPS] = {0}, low[GROUPS] = {0};                                                                    \
    const int kind = minima_of(T);                                                                                  \
    sub_block s;                                                                                                    \
    for (int i = 0; i < k; i += WEIGHTS, p += BYTES_) {                                                             \
      for (int line = 0; line < BYTES_; line += 64) AHEAD(p + line);                                                \
      for (int sub = 0; sub < WEIGHTS / LANES; sub++) {                                                             \
        int b = i / LANES + sub, at = b % 2 * 8;                                                                    \
        int32_t t[8];                                                                                               \
        T##_sub(p, sub, &s);                                                                                        \
        sums_of_four(s.code, q->hi + b * LANES, q->lo + b * LANES, t);                                              \
        float x = q->scale32[b];                                                                                    \
        float both[8];                                                                                              \
        for (int g = 0; g < 8; g++) both[g] = s.scale[g / 4] * x;                                                   \
        for (int g = 0; g < 8; g++) lane[at + g] = __builtin_fmaf((float)t[g], both[g], lane[at + g]);              \
        if (kind == OF_FOUR)                                                                                        \
          for (int g = 0; g < 8; g++) low[at + g] = __builtin_fmaf(q->fours[b * 8 + g], s.add[0] * x, low[at + g]); \
        if (kind == OF_32) low[b % 8] = __builtin_fmaf(q->sum32[b], s.add[0] * x, low[b % 8]);                      \
        if (kind == OF_16)                                                                                          \
          for (int h = 0; h < 2; h++)                                                                               \
            low[(2 * b + h) % 16] = __builtin_fmaf(q->sum16[2 * b + h], s.add[h] * x, low[(2 * b + h) % 16]);       \
      }                                                                                                             \
    }                                                                                                               \
    if (k % CHUNK) /* the zeros that fill the row up: what was -0 becomes 0 */                                      \
      for (int g = 8; g < GROUPS; g++) lane[g] = __builtin_fmaf(0.0f, 0.0f, lane[g]), low[g] += 0.0f;               \
    float sum = tree_of(lane, GROUPS);                                                                              \
    return kind == NONE ? sum : sum + tree_of(low, kind == OF_32 ? 8 : GROUPS);                                     \
  }
FOR_EACH_QUANT(X)
#undef X
#endif

// Values from `from` to `to` of a row of k; `from` is a multiple of 32, and the last ones bring the zeros behind them.
static void quantise(const float *x, int from, int to, int k, quantised *q) {
  int b = from / LANES;
  for (; (b + 1) * LANES <= to; b++) quantise_block(x + b * LANES, b, q);
  if (to < k) return;
  for (; b * LANES < chunked(k); b++) {
    float block[LANES] = {0};
    if (b * LANES < to) memcpy(block, x + b * LANES, sizeof(float) * (size_t)(to - b * LANES));
    quantise_block(block, b, q);
  }
}

static void i16_blocks(const float *w, int stride, int rows, int kind, const quantised *x, int n, int k,
                       float *const *out) {
  switch (n) {
#define CASE(N) \
  case N: i16_block(w, stride, rows, kind, x, N, k, out); break;
    CASE(1)
    CASE(2)
#if I16_X > 2
    CASE(3)
    CASE(4)
#endif
#if I16_X > 4
    CASE(5)
    CASE(6)
#endif
#undef CASE
  }
}

typedef float i16_dot_function(const uint8_t *row, const quantised *q, int k);
typedef void spread_function(const uint8_t *row, float *out, int k);
#define X(T, WEIGHTS, BYTES_) [T] = i16_dot_##T,
static i16_dot_function *const i16_dot_of[] = {FOR_EACH_QUANT(X)};
#undef X
#define X(T, WEIGHTS, BYTES_) [T] = spread_##T,
static spread_function *const spread_of[] = {FOR_EACH_QUANT(X)};
#undef X

// As `products`, of a type that is_integer_type, with quantised rows. `tile` has room for I16_TILE * i16_stride(cols)
// floats.
static void i16_products(const matrix *m, int from, int to, const quantised *x, int n, float *const *out, float *tile) {
  int k = m->cols, kind = minima_of(m->type), stride = i16_stride(k);
  if (n == 1) {
    i16_dot_function *dot = i16_dot_of[m->type];
    for (int r = from; r < to; r++) out[0][r] = dot(m->data + (size_t)r * (size_t)m->row_bytes, x, k);
    return;
  }
  float *at[I16_X];
  for (int r = from; r < to; r += I16_TILE) {
    int rows = to - r < I16_TILE ? to - r : I16_TILE;
    for (int i = 0; i < rows; i++)
      spread_of[m->type](m->data + (size_t)(r + i) * (size_t)m->row_bytes, tile + (size_t)i * (size_t)stride, k);
    for (int c = 0, some; c < n; c += some) {
      some = n - c <= I16_X ? n - c : n - c < 2 * I16_X ? (n - c + 1) / 2 : I16_X;
      for (int i = 0; i < rows; i += I16_ROWS) {
        for (int j = 0; j < some; j++) at[j] = out[c + j] + r + i;
        i16_blocks(tile + (size_t)i * (size_t)stride, stride, rows - i < I16_ROWS ? rows - i : I16_ROWS, kind, x + c,
                   some, k, at);
      }
    }
  }
}

// Either class: with quantised rows where the weights are whole numbers, else with F32. `tile` has tile_floats(cols)
// floats.
static void any_products(const matrix *m, int from, int to, const float *const *x, const quantised *q, int n,
                         float *const *out, float *tile) {
  if (q && is_integer_type(m->type))
    i16_products(m, from, to, q, n, out, tile);
  else
    products(m, from, to, x, n, out, tile);
}
INLINE size_t tile_floats(int cols) {
  size_t plain = (size_t)TILE_ROWS * (size_t)tile_stride(cols), whole = (size_t)I16_TILE * (size_t)i16_stride(cols);
  return plain > whole ? plain : whole;
}
