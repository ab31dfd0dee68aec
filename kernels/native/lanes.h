// The macro layer: a row of 32 lanes in whatever registers the CPU has. Everything above is written once, on top of it.
//
// V holds VL lanes of F32, NV of them make the 32 lanes of the canonical order: element j of a row goes to lane j mod
// 32, a lane adds ascending j by fused multiply-add, then lanes are added in the tree i + (i + 16), + 8, + 4, + 2, + 1.
// A row that does not fill its last 32 lanes is filled up with zeros. Build with -ffp-contract=off: every FMA is
// written.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 32
#define INLINE static inline __attribute__((always_inline))
// Weights come as one stream: into the second level of cache well ahead (across the page's end, where the hardware
// stops), into the first shortly before they are used.
#define AHEAD(p) \
  (__builtin_prefetch((const char *)(p) + 8192, 0, 2), __builtin_prefetch((const char *)(p) + 1024, 0, 3))

#if defined(LANES_PLAIN)
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LANES_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES_AVX2
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define LANES_NEON
#else
#define LANES_PLAIN
#endif

INLINE float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
// Lanes added in halves; n is a power of two
INLINE float tree_of(float *lane, int n) {
  for (int step = n / 2; step; step >>= 1)
    for (int i = 0; i < step; i++) lane[i] = lane[i] + lane[i + step];
  return lane[0];
}
INLINE uint16_t u16_at(const uint8_t *p) {
  uint16_t u;
  memcpy(&u, p, 2);
  return u;
}
INLINE uint32_t u32_at(const uint8_t *p) {
  uint32_t u;
  memcpy(&u, p, 4);
  return u;
}

#if defined(LANES_AVX512) || defined(LANES_AVX2)
#include <immintrin.h>
INLINE float tree8(__m256 t) {
  __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_add_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_shuffle_ps(u, u, 1)));
}
INLINE float half(uint16_t h) { return _cvtsh_ss(h); }
#endif

#if defined(LANES_AVX512)
#define VL 16
#define VARIANT "avx512"
typedef __m512 V;
INLINE V v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, V a) { _mm512_storeu_ps(p, a); }
INLINE V v_all(float f) { return _mm512_set1_ps(f); }
INLINE V v_add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V v_div(V a, V b) { return _mm512_div_ps(a, b); }
INLINE V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V v_max(V a, V b) { return _mm512_max_ps(a, b); } // b where either is no number
INLINE V v_min(V a, V b) { return _mm512_min_ps(a, b); }
INLINE V v_abs(V a) { return _mm512_abs_ps(a); }
INLINE V v_where_less(V a, V b, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
INLINE V v_with_sign(V a, V sign) { return _mm512_or_ps(_mm512_abs_ps(a), _mm512_and_ps(sign, _mm512_set1_ps(-0.0f))); }
// 2^(j - 1) for whole j from -125 to 128
INLINE V v_half_power(V j) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(j), _mm512_set1_epi32(126)), 23));
}
INLINE V v_u8(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE V v_i8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE V v_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void v_store_f16(uint16_t *p, V a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE V v_bf16(const uint8_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE float v_tree16(V s) { return tree8(_mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1))); }
INLINE float v_tree(const V *a) { return v_tree16(_mm512_add_ps(a[0], a[1])); }
// The trees of four rows whose first step is done: lane r of the result is row r's sum.
INLINE __m128 v_trees4(V a, V b, V c, V d) {
  // + 8: halves of two rows side by side; + 4, + 2, + 1 likewise within what is left
  V ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  V cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
  V q = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD)); // four lanes a row
  q = _mm512_add_ps(q, _mm512_shuffle_ps(q, q, 0x4E));
  q = _mm512_add_ps(q, _mm512_shuffle_ps(q, q, 0xB1)); // each row's sum in its four lanes
  return _mm512_castps512_ps128(
      _mm512_permutexvar_ps(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0), q));
}

#elif defined(LANES_AVX2)
#define VL 8
#define VARIANT "avx2"
typedef __m256 V;
INLINE V v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, V a) { _mm256_storeu_ps(p, a); }
INLINE V v_all(float f) { return _mm256_set1_ps(f); }
INLINE V v_add(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V v_sub(V a, V b) { return _mm256_sub_ps(a, b); }
INLINE V v_mul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V v_div(V a, V b) { return _mm256_div_ps(a, b); }
INLINE V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V v_max(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V v_min(V a, V b) { return _mm256_min_ps(a, b); }
INLINE V v_abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE V v_where_less(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE V v_with_sign(V a, V sign) { return _mm256_or_ps(v_abs(a), _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }
INLINE V v_half_power(V j) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(j), _mm256_set1_epi32(126)), 23));
}
INLINE V v_u8(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE V v_i8(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE V v_f16(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void v_store_f16(uint16_t *p, V a) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE V v_bf16(const uint8_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE float v_tree(const V *a) { return tree8(_mm256_add_ps(_mm256_add_ps(a[0], a[2]), _mm256_add_ps(a[1], a[3]))); }

#elif defined(LANES_NEON)
#include <arm_neon.h>
#define VL 4
#define VARIANT "neon"
typedef float32x4_t V;
INLINE V v_load(const float *p) { return vld1q_f32(p); }
INLINE void v_store(float *p, V a) { vst1q_f32(p, a); }
INLINE V v_all(float f) { return vdupq_n_f32(f); }
INLINE V v_add(V a, V b) { return vaddq_f32(a, b); }
INLINE V v_sub(V a, V b) { return vsubq_f32(a, b); }
INLINE V v_mul(V a, V b) { return vmulq_f32(a, b); }
INLINE V v_div(V a, V b) { return vdivq_f32(a, b); }
INLINE V v_fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
INLINE V v_max(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE V v_min(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE V v_abs(V a) { return vabsq_f32(a); }
INLINE V v_where_less(V a, V b, V yes, V no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
INLINE V v_with_sign(V a, V sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, a); }
INLINE V v_half_power(V j) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(j), vdupq_n_s32(126)), 23));
}
INLINE V v_u8(const uint8_t *p) {
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(u32_at(p)))))));
}
INLINE V v_i8(const int8_t *p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(u32_at((const uint8_t *)p)))))));
}
INLINE V v_f16(const uint8_t *p) {
  uint16x4_t u;
  memcpy(&u, p, 8);
  return vcvt_f32_f16(vreinterpret_f16_u16(u));
}
INLINE void v_store_f16(uint16_t *p, V a) {
  uint16x4_t u = vreinterpret_u16_f16(vcvt_f16_f32(a));
  memcpy(p, &u, 8);
}
INLINE V v_bf16(const uint8_t *p) {
  uint16x4_t u;
  memcpy(&u, p, 8);
  return vreinterpretq_f32_u32(vshll_n_u16(u, 16));
}
INLINE float half(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }
INLINE float v_tree(const V *a) {
  V s[4];
  for (int i = 0; i < 4; i++) s[i] = vaddq_f32(a[i], a[i + 4]);
  V t = vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[1], s[3]));
  float32x2_t u = vadd_f32(vget_low_f32(t), vget_high_f32(t));
  return vget_lane_f32(u, 0) + vget_lane_f32(u, 1);
}

#else
#define VL 1
#define VARIANT "plain"
typedef float V;
INLINE V v_load(const float *p) { return *p; }
INLINE void v_store(float *p, V a) { *p = a; }
INLINE V v_all(float f) { return f; }
INLINE V v_add(V a, V b) { return a + b; }
INLINE V v_sub(V a, V b) { return a - b; }
INLINE V v_mul(V a, V b) { return a * b; }
INLINE V v_div(V a, V b) { return a / b; }
INLINE V v_fma(V a, V b, V c) { return fmaf(a, b, c); }
INLINE V v_max(V a, V b) { return a > b ? a : b; }
INLINE V v_min(V a, V b) { return a < b ? a : b; }
INLINE V v_abs(V a) { return fabsf(a); }
INLINE V v_where_less(V a, V b, V yes, V no) { return a < b ? yes : no; }
INLINE V v_with_sign(V a, V sign) { return copysignf(a, sign); }
INLINE V v_half_power(V j) { return j == j ? bits_to_float((uint32_t)((int32_t)j + 126) << 23) : j; }
INLINE V v_u8(const uint8_t *p) { return *p; }
INLINE V v_i8(const int8_t *p) { return *p; }
INLINE float half(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7FFF;
  if (rest >= 0x7C00) return bits_to_float(sign | 0x7F800000 | (rest & 0x3FF) << 13 | ((rest & 0x3FF) ? 0x400000 : 0));
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 5.192296858534828e33f)); // 2^112, exact
}
INLINE V v_f16(const uint8_t *p) { return half(u16_at(p)); }
INLINE void v_store_f16(uint16_t *p, V a) { // to nearest, ties to even
  uint32_t u = float_to_bits(a), sign = u >> 16 & 0x8000, rest = u & 0x7FFFFFFF;
  if (rest > 0x7F800000)
    *p = (uint16_t)(sign | 0x7E00 | (rest >> 13 & 0x3FF));
  else if (rest >= 0x477FF000)
    *p = (uint16_t)(sign | 0x7C00); // what rounds to 65536 or more
  else if (rest < 0x38800000)
    *p = (uint16_t)(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3F000000)); // subnormal: 0.5 has its unit
  else
    *p = (uint16_t)(sign | (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13);
}
INLINE V v_bf16(const uint8_t *p) { return bits_to_float((uint32_t)u16_at(p) << 16); }
INLINE float v_tree(const V *a) {
  float s[LANES];
  memcpy(s, a, sizeof s);
  return tree_of(s, LANES);
}
#endif
#define NV (LANES / VL)

// The sixteen low halves of bytes at q by a table, then their sixteen high halves
INLINE void pick_halves(const int8_t *table, const uint8_t *q, int8_t *out) {
#if defined(LANES_AVX512) || defined(LANES_AVX2)
  __m128i t = _mm_loadu_si128((const __m128i *)table), b = _mm_loadu_si128((const __m128i *)q), low = _mm_set1_epi8(15);
  _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(t, _mm_and_si128(b, low)));
  _mm_storeu_si128((__m128i *)(out + 16), _mm_shuffle_epi8(t, _mm_and_si128(_mm_srli_epi16(b, 4), low)));
#elif defined(LANES_NEON)
  int8x16_t t = vld1q_s8(table);
  uint8x16_t b = vld1q_u8(q);
  vst1q_s8(out, vqtbl1q_s8(t, vandq_u8(b, vdupq_n_u8(15))));
  vst1q_s8(out + 16, vqtbl1q_s8(t, vshrq_n_u8(b, 4)));
#else
  for (int i = 0; i < 16; i++) out[i] = table[q[i] & 15], out[i + 16] = table[q[i] >> 4];
#endif
}

// Runs BODY with the V `a` (and maybe others loaded in BODY at offset `at`) over n values; a tail goes through a full
// register. out, in: float pointers; F: an expression of `a` and of `b`, the same place of `other`.
#define V_MAP2(OUT, IN, OTHER, N, F)                                   \
  do {                                                                 \
    float *out_ = (OUT);                                               \
    const float *in_ = (IN), *other_ = (OTHER);                        \
    int n_ = (N), at_ = 0;                                             \
    for (; at_ + VL <= n_; at_ += VL) {                                \
      V a = v_load(in_ + at_), b = v_load(other_ + at_);               \
      (void)b;                                                         \
      v_store(out_ + at_, F);                                          \
    }                                                                  \
    if (at_ < n_) {                                                    \
      float t_[2][VL] = {{0}, {0}};                                    \
      memcpy(t_[0], in_ + at_, sizeof(float) * (size_t)(n_ - at_));    \
      memcpy(t_[1], other_ + at_, sizeof(float) * (size_t)(n_ - at_)); \
      V a = v_load(t_[0]), b = v_load(t_[1]);                          \
      (void)b;                                                         \
      v_store(t_[0], F);                                               \
      memcpy(out_ + at_, t_[0], sizeof(float) * (size_t)(n_ - at_));   \
    }                                                                  \
  } while (0)
#define V_MAP(OUT, IN, N, F) V_MAP2(OUT, IN, IN, N, F)
