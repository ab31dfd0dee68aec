// 32 weights in two AVX-512 registers. Four bits pick from a table of sixteen weights that is worked out once a
// sub-block: vpermps reads the low four bits of an index, so that no mask is needed. A table holds the very FMA of
// formats.h.
#pragma once

#define PICK _mm512_permutexvar_ps
#define BYTES(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define RIGHT(q, n) _mm512_srli_epi32(q, n)

INLINE V counting(void) { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
INLINE V table_of(V d, float from) { return v_mul(d, v_add(counting(), v_all(from))); }
// F16 d at p in all lanes; of a pair the F16 behind it in *m
#if defined(__AVX512FP16__)
INLINE V half_all(const uint8_t *p) { // one instruction from memory to all lanes
  _Float16 h;
  memcpy(&h, p, 2);
  return _mm512_cvtxph_ps(_mm256_set1_ph(h));
}
INLINE V half_pair(const uint8_t *p, V *m) {
  *m = half_all(p + 2);
  return half_all(p);
}
#else
INLINE V half_all(const uint8_t *p) { return _mm512_set1_ps(half(u16_at(p))); }
INLINE V half_pair(const uint8_t *p, V *m) {
  __m128 f = _mm_cvtph_ps(_mm_cvtsi32_si128((int)u32_at(p)));
  *m = _mm512_broadcastss_ps(_mm_movehdup_ps(f));
  return _mm512_broadcastss_ps(f);
}
#endif
INLINE void pick_nibbles(const uint8_t *q, V table, V *w) {
  __m512i b = BYTES(q);
  w[0] = PICK(b, table);
  w[1] = PICK(RIGHT(b, 4), table);
}
INLINE void pick_five(__m512i low, __m512i high, uint32_t fifth, V under, V over, V *w) {
  w[0] = _mm512_mask_permutexvar_ps(PICK(low, under), (__mmask16)fifth, low, over);
  w[1] = _mm512_mask_permutexvar_ps(PICK(high, under), (__mmask16)(fifth >> 16), high, over);
}
INLINE V signed_table(const int8_t *values, V d) { return v_mul(d, v_i8(values)); }

INLINE void Q4_0_take(const uint8_t *p, int sub, const float *s, V *w) {
  (void)sub, (void)s;
  pick_nibbles(p + 2, table_of(half_all(p), -8), w);
}
INLINE void Q4_1_take(const uint8_t *p, int sub, const float *s, V *w) {
  (void)sub, (void)s;
  V m, d = half_pair(p, &m);
  pick_nibbles(p + 4, v_fma(d, counting(), m), w);
}
INLINE void Q5_0_take(const uint8_t *p, int sub, const float *s, V *w) {
  (void)sub, (void)s;
  V d = half_all(p);
  __m512i b = BYTES(p + 6);
  pick_five(b, RIGHT(b, 4), u32_at(p + 2), table_of(d, -16), table_of(d, 0), w);
}
INLINE void Q5_1_take(const uint8_t *p, int sub, const float *s, V *w) {
  (void)sub, (void)s;
  V m, d = half_pair(p, &m);
  __m512i b = BYTES(p + 8);
  pick_five(b, RIGHT(b, 4), u32_at(p + 4), v_fma(d, counting(), m), v_fma(d, v_add(counting(), v_all(16)), m), w);
}
INLINE void Q8_0_take(const uint8_t *p, int sub, const float *s, V *w) {
  (void)sub, (void)s;
  V d = half_all(p);
  w[0] = v_mul(d, v_i8((const int8_t *)p + 2));
  w[1] = v_mul(d, v_i8((const int8_t *)p + 18));
}
INLINE void IQ4_NL_take(const uint8_t *p, int sub, const float *s, V *w) {
  (void)sub, (void)s;
  pick_nibbles(p + 2, signed_table(iq4_values, half_all(p)), w);
}
INLINE void IQ4_XS_take(const uint8_t *p, int sub, const float *s, V *w) {
  (void)s;
  pick_nibbles(p + 8 + sub * 16, signed_table(iq4_values, v_all(iq4_xs_scale(p, sub))), w);
}
INLINE void MXFP4_take(const uint8_t *p, int sub, const float *s, V *w) {
  (void)sub, (void)s;
  pick_nibbles(p + 1, signed_table(mxfp4_values, v_all(mxfp4_scale(p[0]))), w);
}
// The eight scales, then the eight minima of Q4_K and Q5_K, multiplied by d and dmin; through memory, for a broadcast
// load costs nothing and a shuffle does.
INLINE void k_scales(const uint8_t *p, float *s) {
  uint32_t u[3];
  memcpy(u, p + 4, 12);
  __m128 f = _mm_cvtph_ps(_mm_cvtsi32_si128((int)u32_at(p)));
  __m128i six = _mm_set_epi32((int)((u[2] >> 4 & 0x0f0f0f0f) | (u[1] >> 6 & 0x03030303) << 4), (int)(u[1] & 0x3f3f3f3f),
                              (int)((u[2] & 0x0f0f0f0f) | (u[0] >> 6 & 0x03030303) << 4), (int)(u[0] & 0x3f3f3f3f));
  V d = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_broadcastss_ps(f)), _mm256_broadcastss_ps(_mm_movehdup_ps(f)),
                           1);
  v_store(s, v_mul(d, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six))));
}
INLINE void Q4_K_take(const uint8_t *p, int sub, const float *s, V *w) {
  const uint8_t *q = p + 16 + sub / 2 * 32;
  V table = _mm512_fmsub_ps(v_all(s[sub]), counting(), v_all(s[sub + 8]));
  __m512i a = BYTES(q), b = BYTES(q + 16);
  w[0] = PICK(sub % 2 ? RIGHT(a, 4) : a, table);
  w[1] = PICK(sub % 2 ? RIGHT(b, 4) : b, table);
}
INLINE void Q5_K_take(const uint8_t *p, int sub, const float *s, V *w) {
  const uint8_t *q = p + 48 + sub / 2 * 32;
  __m256i high = _mm256_loadu_si256((const __m256i *)(p + 16));
  uint32_t fifth = _mm256_test_epi8_mask(high, _mm256_set1_epi8((char)(1 << sub)));
  V d = v_all(s[sub]), m = v_all(s[sub + 8]);
  __m512i a = BYTES(q), b = BYTES(q + 16);
  if (sub % 2) a = RIGHT(a, 4), b = RIGHT(b, 4);
  pick_five(a, b, fifth, _mm512_fmsub_ps(d, counting(), m), _mm512_fmsub_ps(d, v_add(counting(), v_all(16)), m), w);
}
INLINE void Q6_K_open(const uint8_t *p, float *s) {
  v_store(s, v_mul(half_all(p + 208), v_i8((const int8_t *)p + 192)));
}
INLINE void Q6_K_take(const uint8_t *p, int sub, const float *s, V *w) {
  __m256i low = _mm256_loadu_si256((const __m256i *)(p + sub / 4 * 64 + sub % 2 * 32));
  __m256i high = _mm256_loadu_si256((const __m256i *)(p + 128 + sub / 4 * 32));
  if (sub % 4 >= 2) low = _mm256_srli_epi16(low, 4);
  high = sub % 4 == 3 ? _mm256_srli_epi16(high, 2) : sub % 4 == 2 ? high : _mm256_slli_epi16(high, sub % 4 ? 2 : 4);
  low = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_and_si256(high, _mm256_set1_epi8(48)));
  low = _mm256_sub_epi8(low, _mm256_set1_epi8(32));
  w[0] = v_mul(v_all(s[sub * 2]), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(low))));
  w[1] = v_mul(v_all(s[sub * 2 + 1]), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(low, 1))));
}
INLINE void Q2_K_take(const uint8_t *p, int sub, const float *s, V *w) {
  const uint8_t *q = p + 16 + sub / 4 * 32;
  V two = _mm512_set_ps(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0); // whatever the bits above the two are
  for (int h = 0; h < 2; h++)
    w[h] = PICK(RIGHT(BYTES(q + h * 16), sub % 4 * 2),
                _mm512_fmsub_ps(v_all(s[sub * 2 + h]), two, v_all(s[16 + sub * 2 + h])));
}
INLINE void Q2_K_open(const uint8_t *p, float *s) {
  V m, d = half_pair(p + 80, &m);
  __m512i b = BYTES(p);
  v_store(s, v_mul(d, _mm512_cvtepi32_ps(_mm512_and_epi32(b, _mm512_set1_epi32(15)))));
  v_store(s + 16, v_mul(m, _mm512_cvtepi32_ps(RIGHT(b, 4))));
}
INLINE void Q3_K_open(const uint8_t *p, float *s) {
  float d = half(u16_at(p + 108));
  for (int g = 0; g < 16; g++) {
    int low = g < 8 ? p[96 + g] & 15 : p[88 + g] >> 4, high = p[104 + g % 4] >> (g / 4 * 2) & 3;
    s[g] = d * (float)((low | high << 4) - 32);
  }
}
INLINE void Q3_K_take(const uint8_t *p, int sub, const float *s, V *w) {
  const uint8_t *q = p + 32 + sub / 4 * 32;
  __m256i bits = _mm256_loadu_si256((const __m256i *)p);
  uint32_t third = _mm256_test_epi8_mask(bits, _mm256_set1_epi8((char)(1 << sub)));
  V two = _mm512_set_ps(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0), less = v_sub(two, v_all(4));
  for (int h = 0; h < 2; h++) {
    __m512i i = RIGHT(BYTES(q + h * 16), sub % 4 * 2);
    V d = v_all(s[sub * 2 + h]);
    w[h] = _mm512_mask_permutexvar_ps(PICK(i, v_mul(d, less)), (__mmask16)(third >> (h * 16)), i, v_mul(d, two));
  }
}
INLINE void Q4_K_open(const uint8_t *p, float *s) { k_scales(p, s); }
INLINE void Q5_K_open(const uint8_t *p, float *s) { k_scales(p, s); }
#define X(T) \
  INLINE void T##_open(const uint8_t *p, float *s) { (void)p, (void)s; }
X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(IQ4_NL) X(IQ4_XS) X(MXFP4)
#undef X
