// Quantised blocks: for each type, 32 weights of a block as whole numbers with a scale and an addend for each half.
//
// weight = scale * code + addend, rounded once: every product of a scale and a code is exact in F32 (at most 11 bits of
// an F16, 7 of a sub-scale and 6 of a code), so that an FMA gives the bits of ggml's own order of multiplication.
#pragma once
#include "lanes.h"

enum type {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  IQ4_XS = 23,
  BF16 = 30,
  MXFP4 = 39
};

typedef struct {
  int8_t code[LANES];
  float scale[2], add[2]; // of elements 0 to 15 and 16 to 31
} sub_block;

// Types by name with the weights of a block and its bytes. Floats count as blocks of 32.
#define FOR_EACH_QUANT(X) \
  X(Q4_0, 32, 18)         \
  X(Q4_1, 32, 20)         \
  X(Q5_0, 32, 22)         \
  X(Q5_1, 32, 24)         \
  X(Q8_0, 32, 34)         \
  X(Q2_K, 256, 84)        \
  X(Q3_K, 256, 110)       \
  X(Q4_K, 256, 144)       \
  X(Q5_K, 256, 176)       \
  X(Q6_K, 256, 210)       \
  X(IQ4_NL, 32, 18)       \
  X(IQ4_XS, 256, 136)     \
  X(MXFP4, 32, 17)
#define FOR_EACH_TYPE(X) \
  X(F32, 32, 128)        \
  X(F16, 32, 64)         \
  X(BF16, 32, 64)        \
  FOR_EACH_QUANT(X)

#define X(T, WEIGHTS, BYTES) enum { T##_weights = WEIGHTS, T##_bytes = BYTES };
FOR_EACH_TYPE(X)
#undef X

INLINE void same_halves(sub_block *b, float scale, float add) {
  b->scale[0] = b->scale[1] = scale;
  b->add[0] = b->add[1] = add;
}
// Eight bytes at a time, as a word: what is written byte by byte would have to reach memory before a register reads it.
INLINE void put8(int8_t *to, uint64_t bytes,
                 int less) { // bytes below 128, less a number that borrows from no neighbour
  bytes = ((bytes | 0x8080808080808080u) - 0x0101010101010101u * (unsigned)less) ^ 0x8080808080808080u;
  memcpy(to, &bytes, 8);
}
INLINE void nibbles(sub_block *b, const uint8_t *q, int less) { // sixteen low halves, then sixteen high ones
  for (int i = 0; i < 16; i += 8) {
    uint64_t x;
    memcpy(&x, q + i, 8);
    put8(b->code + i, x & 0x0F0F0F0F0F0F0F0Fu, less);
    put8(b->code + 16 + i, x >> 4 & 0x0F0F0F0F0F0F0F0Fu, less);
  }
}
INLINE void fifth_bits(sub_block *b, uint32_t high, int less) {
  for (int i = 0; i < 4; i++) { // eight bits to eight bytes: each byte keeps its own bit, then becomes 16 or 0
    uint64_t bytes = (high >> (8 * i) & 255) * 0x0101010101010101u & 0x8040201008040201u, code;
    bytes = ((bytes + 0x7F7F7F7F7F7F7F7Fu) | bytes) >> 3 & 0x1010101010101010u;
    memcpy(&code, b->code + 8 * i, 8);
    put8(b->code + 8 * i, code | bytes, less);
  }
}
static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t mxfp4_values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                        0, -1, -2, -3, -4, -6, -8, -12}; // twice the E2M1 values
// 2^(e - 128): half of the E8M0 scale, since the values are doubled. The two smallest are subnormal.
INLINE float mxfp4_scale(uint8_t e) { return bits_to_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23); }

// ---- a sub-block of each type; p is its whole block, sub counts 32 weights

INLINE void Q4_0_sub(const uint8_t *p, int sub, sub_block *b) {
  (void)sub;
  nibbles(b, p + 2, 8);
  same_halves(b, half(u16_at(p)), -0.0f);
}
INLINE void Q4_1_sub(const uint8_t *p, int sub, sub_block *b) {
  (void)sub;
  nibbles(b, p + 4, 0);
  same_halves(b, half(u16_at(p)), half(u16_at(p + 2)));
}
INLINE void Q5_0_sub(const uint8_t *p, int sub, sub_block *b) {
  (void)sub;
  nibbles(b, p + 6, 0);
  fifth_bits(b, u32_at(p + 2), 16);
  same_halves(b, half(u16_at(p)), -0.0f);
}
INLINE void Q5_1_sub(const uint8_t *p, int sub, sub_block *b) {
  (void)sub;
  nibbles(b, p + 8, 0);
  fifth_bits(b, u32_at(p + 4), 0);
  same_halves(b, half(u16_at(p)), half(u16_at(p + 2)));
}
INLINE void Q8_0_sub(const uint8_t *p, int sub, sub_block *b) {
  (void)sub;
  memcpy(b->code, p + 2, 32);
  same_halves(b, half(u16_at(p)), -0.0f);
}
INLINE void Q2_K_sub(const uint8_t *p, int sub, sub_block *b) {
  const uint8_t *q = p + 16 + sub / 4 * 32;
  for (int i = 0; i < 32; i++) b->code[i] = (int8_t)(q[i] >> (sub % 4 * 2) & 3);
  float d = half(u16_at(p + 80)), m = half(u16_at(p + 82));
  for (int h = 0; h < 2; h++)
    b->scale[h] = d * (float)(p[sub * 2 + h] & 15), b->add[h] = -(m * (float)(p[sub * 2 + h] >> 4));
}
INLINE void Q3_K_sub(const uint8_t *p, int sub, sub_block *b) {
  const uint8_t *q = p + 32 + sub / 4 * 32, *s = p + 96;
  for (int i = 0; i < 32; i++) b->code[i] = (int8_t)((q[i] >> (sub % 4 * 2) & 3) - ((p[i] >> sub & 1) ? 0 : 4));
  float d = half(u16_at(p + 108));
  for (int h = 0; h < 2; h++) {
    int g = sub * 2 + h, low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> (g / 4 * 2) & 3;
    b->scale[h] = d * (float)((low | high << 4) - 32), b->add[h] = -0.0f;
  }
}
INLINE int k_scale(const uint8_t *s, int sub) {
  return sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
}
INLINE int k_min(const uint8_t *s, int sub) { return sub < 4 ? s[sub + 4] & 63 : s[sub + 4] >> 4 | (s[sub] >> 6) << 4; }
INLINE void Q4_K_sub(const uint8_t *p, int sub, sub_block *b) {
  const uint8_t *q = p + 16 + sub / 2 * 32;
  for (int i = 0; i < 32; i++) b->code[i] = (int8_t)(q[i] >> (sub % 2 * 4) & 15);
  same_halves(b, half(u16_at(p)) * (float)k_scale(p + 4, sub), -(half(u16_at(p + 2)) * (float)k_min(p + 4, sub)));
}
INLINE void Q5_K_sub(const uint8_t *p, int sub, sub_block *b) {
  const uint8_t *q = p + 48 + sub / 2 * 32, *high = p + 16;
  for (int i = 0; i < 32; i++) b->code[i] = (int8_t)((q[i] >> (sub % 2 * 4) & 15) | (high[i] >> sub & 1) << 4);
  same_halves(b, half(u16_at(p)) * (float)k_scale(p + 4, sub), -(half(u16_at(p + 2)) * (float)k_min(p + 4, sub)));
}
INLINE void Q6_K_sub(const uint8_t *p, int sub, sub_block *b) {
  const uint8_t *low = p + sub / 4 * 64 + sub % 2 * 32, *high = p + 128 + sub / 4 * 32;
  int up = sub % 4 / 2 * 4, bits = sub % 4 * 2;
  for (int i = 0; i < 32; i++) b->code[i] = (int8_t)(((low[i] >> up & 15) | (high[i] >> bits & 3) << 4) - 32);
  float d = half(u16_at(p + 208));
  for (int h = 0; h < 2; h++) b->scale[h] = d * (float)(int8_t)p[192 + sub * 2 + h], b->add[h] = -0.0f;
}
INLINE void IQ4_NL_sub(const uint8_t *p, int sub, sub_block *b) {
  (void)sub;
  pick_halves(iq4_values, p + 2, b->code);
  same_halves(b, half(u16_at(p)), -0.0f);
}
INLINE float iq4_xs_scale(const uint8_t *p, int sub) {
  int low = p[4 + sub / 2] >> (sub % 2 * 4) & 15, high = u16_at(p + 2) >> (sub * 2) & 3;
  return half(u16_at(p)) * (float)((low | high << 4) - 32);
}
INLINE void IQ4_XS_sub(const uint8_t *p, int sub, sub_block *b) {
  pick_halves(iq4_values, p + 8 + sub * 16, b->code);
  same_halves(b, iq4_xs_scale(p, sub), -0.0f);
}
INLINE void MXFP4_sub(const uint8_t *p, int sub, sub_block *b) {
  (void)sub;
  pick_halves(mxfp4_values, p + 1, b->code);
  same_halves(b, mxfp4_scale(p[0]), -0.0f);
}

// ---- 32 weights in registers: T_open works out what a block's sub-blocks share, T_take gives one of them

INLINE void weights_of(const sub_block *b, V *w) {
  for (int i = 0; i < NV; i++)
    w[i] = v_fma(v_i8(b->code + i * VL), v_all(b->scale[i * VL / 16]), v_all(b->add[i * VL / 16]));
}
#define X(T, BITS, LOAD)                                                  \
  INLINE void T##_open(const uint8_t *p, float *s) { (void)p, (void)s; }  \
  INLINE void T##_take(const uint8_t *p, int sub, const float *s, V *w) { \
    (void)sub, (void)s;                                                   \
    for (int i = 0; i < NV; i++) w[i] = LOAD(p + i * VL * BITS / 8);      \
  }
INLINE V v_f32(const uint8_t *p) { return v_load((const float *)(const void *)p); }
X(F32, 32, v_f32)
X(F16, 16, v_f16)
X(BF16, 16, v_bf16)
#undef X
#if defined(LANES_AVX512)
#include "formats_avx512.h"
#else
#define X(T, WEIGHTS, BYTES)                                              \
  INLINE void T##_open(const uint8_t *p, float *s) { (void)p, (void)s; }  \
  INLINE void T##_take(const uint8_t *p, int sub, const float *s, V *w) { \
    sub_block b;                                                          \
    (void)s;                                                              \
    T##_sub(p, sub, &b);                                                  \
    weights_of(&b, w);                                                    \
  }
FOR_EACH_QUANT(X)
#undef X
#endif
