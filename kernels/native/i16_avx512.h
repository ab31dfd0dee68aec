// The i16 class with AVX-512 VNNI. One row by one row, 64 weights a step: codes as unsigned bytes with a bias that is a
// power of two, taken off by the exact sums of four activations.
#pragma once
// Included by i16.h in place of the parts that it has for other CPUs.

INLINE void quantise_block(const float *x, int b, quantised *q) {
  V x0 = v_load(x), x1 = v_load(x + 16);
  float inverse, scale = block_scale(_mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_castps_si512(v_abs(x0)),
                                                                              _mm512_castps_si512(v_abs(x1)))),
                                     &inverse);
  __m512i v0 = _mm512_setzero_si512(), v1 = v0;
  if (inverse) v0 = _mm512_cvtps_epi32(v_mul(x0, v_all(inverse))), v1 = _mm512_cvtps_epi32(v_mul(x1, v_all(inverse)));
  __m512i h0 = _mm512_srai_epi32(_mm512_add_epi32(v0, _mm512_set1_epi32(128)), 8),
          h1 = _mm512_srai_epi32(_mm512_add_epi32(v1, _mm512_set1_epi32(128)), 8);
  _mm_storeu_si128((__m128i *)(q->hi + b * LANES), _mm512_cvtepi32_epi8(h0));
  _mm_storeu_si128((__m128i *)(q->hi + b * LANES + 16), _mm512_cvtepi32_epi8(h1));
  _mm_storeu_si128((__m128i *)(q->lo + b * LANES),
                   _mm512_cvtepi32_epi8(_mm512_sub_epi32(v0, _mm512_slli_epi32(h0, 8))));
  _mm_storeu_si128((__m128i *)(q->lo + b * LANES + 16),
                   _mm512_cvtepi32_epi8(_mm512_sub_epi32(v1, _mm512_slli_epi32(h1, 8))));
  // as 16-bit integers: elements 4 g and 4 g + 2 of the eight groups, then 4 g + 1 and 4 g + 3
  __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(v0)), _mm512_cvtepi32_epi16(v1), 1);
  v = _mm512_permutexvar_epi16(_mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26,
                                                24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
                               v);
  __m256i even = _mm512_castsi512_si256(v), odd = _mm512_extracti64x4_epi64(v, 1), one = _mm256_set1_epi16(1);
  int16_t *pairs = (int16_t *)q->spread + b / 2 * CHUNK + b % 2 * 16;
  _mm256_storeu_si256((__m256i *)pairs, even);
  _mm256_storeu_si256((__m256i *)(pairs + 32), odd);
  __m256i four = _mm256_add_epi32(_mm256_madd_epi16(even, one), _mm256_madd_epi16(odd, one));
  _mm256_storeu_si256((__m256i *)(q->four + b * 8), four);
  _mm256_storeu_ps(q->fours + b * 8, _mm256_cvtepi32_ps(four));
  _mm256_storeu_ps(q->scale + b * 8, _mm256_set1_ps(scale));
  four = _mm256_hadd_epi32(four, four);
  four = _mm256_hadd_epi32(four, four);
  int low = _mm256_extract_epi32(four, 0), high = _mm256_extract_epi32(four, 4);
  q->sum16[b * 2] = (float)low, q->sum16[b * 2 + 1] = (float)high;
  q->scale16[b * 2] = q->scale16[b * 2 + 1] = scale;
  q->sum32[b] = (float)(low + high);
  q->scale32[b] = scale;
}

INLINE __m256i low_high(const uint8_t *q) { // sixteen low halves, then sixteen high ones
  __m128i b = _mm_loadu_si128((const __m128i *)q);
  return _mm256_and_si256(_mm256_inserti128_si256(_mm256_castsi128_si256(b), _mm_srli_epi16(b, 4), 1),
                          _mm256_set1_epi8(15));
}
INLINE __m256i with_bit(__m256i code, uint32_t mask, int bit) {
  return _mm256_mask_or_epi32(code, 0xFF, code, _mm256_maskz_mov_epi8(mask, _mm256_set1_epi8((char)bit)));
}
INLINE __m256i looked_up_bytes(const uint8_t *q, const int8_t *values) {
  __m128i table = _mm_xor_si128(_mm_loadu_si128((const __m128i *)values), _mm_set1_epi8(-128));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), low_high(q));
}
// T_codes: codes and bias; T_factors: the scales of the block's sub-blocks (two each where SCALES is 2), and the minima
INLINE __m256i Q4_0_codes(const uint8_t *p, int sub) { return (void)sub, low_high(p + 2); }
INLINE __m256i Q4_1_codes(const uint8_t *p, int sub) { return (void)sub, low_high(p + 4); }
INLINE __m256i Q5_0_codes(const uint8_t *p, int sub) { return (void)sub, with_bit(low_high(p + 6), u32_at(p + 2), 16); }
INLINE __m256i Q5_1_codes(const uint8_t *p, int sub) { return (void)sub, with_bit(low_high(p + 8), u32_at(p + 4), 16); }
INLINE __m256i Q8_0_codes(const uint8_t *p, int sub) {
  return (void)sub, _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(p + 2)), _mm256_set1_epi8(-128));
}
INLINE __m256i IQ4_NL_codes(const uint8_t *p, int sub) { return (void)sub, looked_up_bytes(p + 2, iq4_values); }
INLINE __m256i IQ4_XS_codes(const uint8_t *p, int sub) { return looked_up_bytes(p + 8 + sub * 16, iq4_values); }
INLINE __m256i MXFP4_codes(const uint8_t *p, int sub) { return (void)sub, looked_up_bytes(p + 1, mxfp4_values); }
INLINE __m256i shifted_and(const uint8_t *q, int right, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i *)q), right),
                          _mm256_set1_epi8((char)mask));
}
INLINE uint32_t bit_of_each(const uint8_t *q, int bit) {
  return _mm256_test_epi8_mask(_mm256_loadu_si256((const __m256i *)q), _mm256_set1_epi8((char)(1 << bit)));
}
INLINE __m256i Q2_K_codes(const uint8_t *p, int sub) { return shifted_and(p + 16 + sub / 4 * 32, sub % 4 * 2, 3); }
INLINE __m256i Q3_K_codes(const uint8_t *p, int sub) {
  return with_bit(shifted_and(p + 32 + sub / 4 * 32, sub % 4 * 2, 3), bit_of_each(p, sub), 4);
}
INLINE __m256i Q4_K_codes(const uint8_t *p, int sub) { return shifted_and(p + 16 + sub / 2 * 32, sub % 2 * 4, 15); }
INLINE __m256i Q5_K_codes(const uint8_t *p, int sub) {
  return with_bit(shifted_and(p + 48 + sub / 2 * 32, sub % 2 * 4, 15), bit_of_each(p + 16, sub), 16);
}
INLINE __m256i Q6_K_codes(const uint8_t *p, int sub) {
  __m256i high = _mm256_loadu_si256((const __m256i *)(p + 128 + sub / 4 * 32));
  high = sub % 4 == 3 ? _mm256_srli_epi16(high, 2) : sub % 4 == 2 ? high : _mm256_slli_epi16(high, sub % 4 ? 2 : 4);
  return _mm256_or_si256(shifted_and(p + sub / 4 * 64 + sub % 2 * 32, sub % 4 / 2 * 4, 15),
                         _mm256_and_si256(high, _mm256_set1_epi8(48)));
}

enum {
  Q4_0_bias = 3,
  Q4_1_bias = -1,
  Q5_0_bias = 4,
  Q5_1_bias = -1,
  Q8_0_bias = 7,
  Q2_K_bias = -1,
  Q3_K_bias = 2,
  Q4_K_bias = -1,
  Q5_K_bias = -1,
  Q6_K_bias = 5,
  IQ4_NL_bias = 7,
  IQ4_XS_bias = 7,
  MXFP4_bias = 7
};
enum {
  Q4_0_scales = 1,
  Q4_1_scales = 1,
  Q5_0_scales = 1,
  Q5_1_scales = 1,
  Q8_0_scales = 1,
  Q2_K_scales = 2,
  Q3_K_scales = 2,
  Q4_K_scales = 1,
  Q5_K_scales = 1,
  Q6_K_scales = 2,
  IQ4_NL_scales = 1,
  IQ4_XS_scales = 1,
  MXFP4_scales = 1
};

// Of two blocks of 32, or of one and zeros: the scale of each group of four, and the minima where the type has them
INLINE V two_scales(const uint8_t *p, const uint8_t *next, V *m) {
  __m128 f =
      _mm_cvtph_ps(_mm_set_epi64x(0, (int64_t)((uint64_t)(next ? u32_at(next) : 0) << 32 | u32_at(p)))); // d, m, d, m
  __m512i first = _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0);
  *m = _mm512_permutexvar_ps(_mm512_or_si512(first, _mm512_set1_epi32(1)), _mm512_castps128_ps512(f));
  return _mm512_permutexvar_ps(first, _mm512_castps128_ps512(f));
}
#define X(T)                                                                                       \
  INLINE V T##_two(const uint8_t *p, const uint8_t *next, V *m) { return two_scales(p, next, m); } \
  INLINE void T##_factors(const uint8_t *p, float *s) { (void)p, (void)s; }
X(Q4_0)
X(Q4_1)
X(Q5_0)
X(Q5_1)
X(Q8_0)
X(IQ4_NL)
#undef X
INLINE V MXFP4_two(const uint8_t *p, const uint8_t *next, V *m) {
  *m = v_all(0);
  return _mm512_mask_mov_ps(v_all(mxfp4_scale(p[0])), 0xFF00, v_all(next ? mxfp4_scale(next[0]) : 0));
}
INLINE void MXFP4_factors(const uint8_t *p, float *s) { (void)p, (void)s; }
#define X(T) \
  INLINE V T##_two(const uint8_t *p, const uint8_t *next, V *m) { return (void)p, (void)next, (void)m, v_all(0); }
X(IQ4_XS)
X(Q2_K)
X(Q3_K)
X(Q4_K)
X(Q5_K)
X(Q6_K)
#undef X
INLINE void IQ4_XS_factors(const uint8_t *p, float *s) {
  for (int i = 0; i < 8; i++) s[i] = iq4_xs_scale(p, i);
}
#define X(T) \
  INLINE void T##_factors(const uint8_t *p, float *s) { T##_open(p, s); }
X(Q2_K)
X(Q3_K)
X(Q4_K)
X(Q5_K)
X(Q6_K)
#undef X

// The scales of 64 weights from sub-block `sub` on, one for each group of four
INLINE V scales64(const float *s, int sub, int each) {
  if (each == 1) return _mm512_mask_broadcastss_ps(v_all(s[sub]), 0xFF00, _mm_load_ss(s + sub + 1));
  return _mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
                               _mm512_castps128_ps512(_mm_loadu_ps(s + 2 * sub)));
}
// Of a block of 256: the product of the scales of weights and activations, and from it that of 64 weights from `sub` on
INLINE V both_scales(const float *s, const quantised *q, int i, int each) {
  if (each == 1) return _mm512_castps256_ps512(_mm256_mul_ps(_mm256_load_ps(s), _mm256_loadu_ps(q->scale32 + i / 32)));
  return v_mul(v_load(s), v_load(q->scale16 + i / 16));
}
INLINE V picked64(V both, int sub, int each) {
  __m512i at = each == 1 ? _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0)
                         : _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return _mm512_permutexvar_ps(_mm512_add_epi32(at, _mm512_set1_epi32(sub * each)), both);
}
INLINE V sums64(__m512i w, const quantised *q, int i, int bias) { // exact sums of four products of 64 from i on
  __m512i t = _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w, _mm512_loadu_si512(q->hi + i)), 8);
  if (bias >= 0) t = _mm512_sub_epi32(t, _mm512_slli_epi32(_mm512_loadu_si512(q->four + i / 4), (unsigned)bias));
  return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(t, w, _mm512_loadu_si512(q->lo + i)));
}
#define X(T, WEIGHTS, BYTES_)                                                                                         \
  static float i16_dot_##T(const uint8_t *p, const quantised *q, int k) {                                             \
    const int kind = minima_of(T), blocks = WEIGHTS == LANES ? 2 : 1;                                                 \
    V acc = v_all(0), low = acc;                                                                                      \
    __m256 low8 = _mm256_setzero_ps();                                                                                \
    float s[32] __attribute__((aligned(64)));                                                                         \
    for (int i = 0; i < k; p += BYTES_ * blocks) {                                                                    \
      int whole = WEIGHTS != LANES || i + CHUNK <= k; /* else one block of 32 is left, and zeros */                   \
      for (int line = 0; line < BYTES_ * blocks; line += 64) AHEAD(p + line);                                         \
      V two = v_all(0), m = two;                                                                                      \
      if (WEIGHTS == LANES) {                                                                                         \
        two = T##_two(p, whole ? p + BYTES_ : 0, &m);                                                                 \
      } else {                                                                                                        \
        T##_factors(p, s);                                                                                            \
        if (kind == OF_32)                                                                                            \
          low8 = _mm256_fmadd_ps(_mm256_loadu_ps(q->sum32 + i / 32),                                                  \
                                 _mm256_mul_ps(_mm256_sub_ps(_mm256_set1_ps(-0.0f), _mm256_load_ps(s + 8)),           \
                                               _mm256_loadu_ps(q->scale32 + i / 32)),                                 \
                                 low8);                                                                               \
        if (kind == OF_16)                                                                                            \
          low = v_fma(v_load(q->sum16 + i / 16), v_mul(v_negated(v_load(s + 16)), v_load(q->scale16 + i / 16)), low); \
        two = both_scales(s, q, i, T##_scales);                                                                       \
      }                                                                                                               \
      _Pragma("GCC unroll 4") for (int sub = 0; sub < (WEIGHTS == LANES ? 2 : WEIGHTS / LANES);                       \
                                   sub += 2, i += CHUNK) {                                                            \
        __m256i a = T##_codes(p, sub), b = WEIGHTS != LANES ? T##_codes(p, sub + 1)                                   \
                                           : whole          ? T##_codes(p + BYTES_, 0)                                \
                                                            : _mm256_setzero_si256();                                 \
        __m512i w = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);                                              \
        V scale = WEIGHTS == LANES ? v_mul(two, v_load(q->scale + i / 4)) : picked64(two, sub, T##_scales);           \
        acc = v_fma(sums64(w, q, i, T##_bias), scale, acc);                                                           \
        if (kind == OF_FOUR) low = v_fma(v_load(q->fours + i / 4), v_mul(m, v_load(q->scale + i / 4)), low);          \
      }                                                                                                               \
    }                                                                                                                 \
    float sum = v_tree16(acc);                                                                                        \
    return kind == NONE ? sum : sum + (kind == OF_32 ? tree8(low8) : v_tree16(low));                                  \
  }
FOR_EACH_QUANT(X)
#undef X

// ---- tiles: whole weights as pairs of 16-bit integers in the order of the activations' pairs

INLINE int tile_scales(int k) { return chunked(k) / 2; } // floats in front of the scales; the minima stand behind them
INLINE int tile_minima(int k) { return chunked(k) / 2 + chunked(k) / 4; }
INLINE void store_pairs(__m512i bytes, int bias, float *out) {
  __m512i less = _mm512_set1_epi16((short)(bias >= 0 ? 1 << bias : 0));
  _mm512_storeu_si512(out, _mm512_sub_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(255)), less));
  _mm512_storeu_si512(out + 16, _mm512_sub_epi16(_mm512_srli_epi16(bytes, 8), less));
}
#define X(T, WEIGHTS, BYTES_)                                                                                       \
  static void spread_##T(const uint8_t *p, float *out, int k) {                                                     \
    const int kind = minima_of(T), blocks = WEIGHTS == LANES ? 2 : 1;                                               \
    float *scale = out + tile_scales(k), *m = out + tile_minima(k);                                                 \
    float s[32] __attribute__((aligned(64))) = {0};                                                                 \
    for (int i = 0; i < k; p += BYTES_ * blocks) {                                                                  \
      int whole = WEIGHTS != LANES || i + CHUNK <= k;                                                               \
      V two = v_all(0), low = two;                                                                                  \
      if (WEIGHTS == LANES)                                                                                         \
        two = T##_two(p, whole ? p + BYTES_ : 0, &low);                                                             \
      else                                                                                                          \
        T##_factors(p, s);                                                                                          \
      if (kind == OF_FOUR) v_store(m + i / 4, low);                                                                 \
      if (kind == OF_32) _mm256_storeu_ps(m + i / 32, _mm256_sub_ps(_mm256_set1_ps(-0.0f), _mm256_load_ps(s + 8))); \
      if (kind == OF_16) v_store(m + i / 16, v_negated(v_load(s + 16)));                                            \
      _Pragma("GCC unroll 4") for (int sub = 0; sub < (WEIGHTS == LANES ? 2 : WEIGHTS / LANES);                     \
                                   sub += 2, i += CHUNK) {                                                          \
        __m256i none = _mm256_set1_epi8((char)(T##_bias >= 0 ? 1 << T##_bias : 0));                                 \
        __m256i a = T##_codes(p, sub), b = WEIGHTS != LANES ? T##_codes(p, sub + 1)                                 \
                                           : whole          ? T##_codes(p + BYTES_, 0)                              \
                                                            : none;                                                 \
        store_pairs(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), T##_bias, out + i / 2);                    \
        v_store(scale + i / 4, WEIGHTS == LANES ? two : scales64(s, sub, T##_scales));                              \
      }                                                                                                             \
    }                                                                                                               \
  }
FOR_EACH_QUANT(X)
#undef X

#define I16_ROWS \
  4 // a tile has room for four rows from any multiple of four on: what is there beside its rows is not used
#define I16_X 4

// acc[r][c]: lanes of the products; low[r][c]: those of the minima, sixteen or, with -0 behind them, eight
INLINE void i16_lanes(const float *w, int stride, const quantised *x, int n, int k, V acc[I16_ROWS][I16_X]) {
  V a[I16_ROWS][I16_X];
  const float *at[I16_X];
  ptrdiff_t scales = x[0].scale - x[0].spread; // of every row: one pointer a row is enough
  for (int c = 0; c < n; c++) at[c] = x[c].spread;
  for (int r = 0; r < I16_ROWS; r++)
    for (int c = 0; c < n; c++) a[r][c] = v_all(0);
  for (int i = 0; i < k; i += CHUNK) {
    __m512i u[I16_ROWS], v[I16_ROWS];
    V s[I16_ROWS];
    for (int r = 0; r < I16_ROWS; r++) {
      u[r] = _mm512_loadu_si512(w + r * stride + i / 2);
      v[r] = _mm512_loadu_si512(w + r * stride + i / 2 + 16);
      s[r] = v_load(w + r * stride + tile_scales(k) + i / 4);
    }
    for (int c = 0; c < n; c++) {
      __m512i y = _mm512_loadu_si512(at[c] + i / 2), z = _mm512_loadu_si512(at[c] + i / 2 + 16);
      V scale = v_load(at[c] + scales + i / 4);
      for (int r = 0; r < I16_ROWS; r++) {
        __m512i t = _mm512_dpwssd_epi32(_mm512_madd_epi16(u[r], y), v[r], z);
        a[r][c] = v_fma(_mm512_cvtepi32_ps(t), v_mul(s[r], scale), a[r][c]);
      }
    }
  }
  for (int r = 0; r < I16_ROWS; r++)
    for (int c = 0; c < n; c++) acc[r][c] = a[r][c];
}
INLINE void i16_minima(const float *w, int stride, int kind, const quantised *x, int n, int k, V low[I16_ROWS][I16_X]) {
  int each = kind == OF_FOUR ? 4 : kind == OF_16 ? 16 : 32, step = kind == OF_32 ? 8 : 16;
  V a[I16_ROWS][I16_X];
  const float *at[I16_X];
  ptrdiff_t scales = (kind == OF_FOUR ? x[0].scale : kind == OF_16 ? x[0].scale16 : x[0].scale32) - x[0].spread;
  ptrdiff_t all_sums = (kind == OF_FOUR ? x[0].fours : kind == OF_16 ? x[0].sum16 : x[0].sum32) - x[0].spread;
  for (int c = 0; c < n; c++) at[c] = x[c].spread;
  for (int r = 0; r < I16_ROWS; r++)
    for (int c = 0; c < n; c++)
      a[r][c] = kind == OF_32 ? _mm512_insertf32x8(v_all(-0.0f), _mm256_setzero_ps(), 0) : v_all(0);
  for (int i = 0; i < k / each; i += step) {
    V m[I16_ROWS];
    for (int r = 0; r < I16_ROWS; r++) m[r] = v_load(w + r * stride + tile_minima(k) + i);
    for (int c = 0; c < n; c++) {
      V scale = v_load(at[c] + scales + i), sums = v_load(at[c] + all_sums + i);
      for (int r = 0; r < I16_ROWS; r++)
        a[r][c] = kind == OF_32 ? _mm512_mask3_fmadd_ps(sums, v_mul(m[r], scale), a[r][c], 0xFF)
                                : v_fma(sums, v_mul(m[r], scale), a[r][c]);
    }
  }
  for (int r = 0; r < I16_ROWS; r++)
    for (int c = 0; c < n; c++) low[r][c] = a[r][c];
}
INLINE void i16_block(const float *w, int stride, int rows, int kind, const quantised *x, int n, int k,
                      float *const *out) {
  V acc[I16_ROWS][I16_X], low[I16_ROWS][I16_X] = {{v_all(0)}};
  int full = chunked(k);
  i16_lanes(w, stride, x, n, full, acc);
  switch (kind) {
  case OF_FOUR: i16_minima(w, stride, OF_FOUR, x, n, full, low); break;
  case OF_32: i16_minima(w, stride, OF_32, x, n, full, low); break;
  case OF_16: i16_minima(w, stride, OF_16, x, n, full, low); break;
  }
  for (int c = 0; c < n; c++) {
    float sum[I16_ROWS];
    __m128 t = v_trees4(acc[0][c], acc[1][c], acc[2][c], acc[3][c]);
    if (kind != NONE) t = _mm_add_ps(t, v_trees4(low[0][c], low[1][c], low[2][c], low[3][c]));
    _mm_storeu_ps(sum, t);
    memcpy(out[c], sum, sizeof(float) * (size_t)rows);
  }
}
