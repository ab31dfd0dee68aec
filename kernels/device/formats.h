// Quantised blocks of one type, TYPE by its ggml number: `take` gives four consecutive weights of a block.
//
// weight = scale * code + addend, rounded once: every product of a scale and a code is exact in F32, so that an FMA
// gives the bits of ggml's own order of multiplication. An addend of -0 changes nothing.
#define T_F32 0
#define T_F16 1
#define T_Q4_0 2
#define T_Q4_1 3
#define T_Q5_0 6
#define T_Q5_1 7
#define T_Q8_0 8
#define T_Q2_K 10
#define T_Q3_K 11
#define T_Q4_K 12
#define T_Q5_K 13
#define T_Q6_K 14
#define T_IQ4_NL 20
#define T_IQ4_XS 23
#define T_BF16 30
#define T_MXFP4 39

// Weights of a block, its bytes, and what quants are aligned to; floats count as blocks of 32
#if TYPE == T_F32
#define BLOCK 32
#define BYTES 128
#elif TYPE == T_F16 || TYPE == T_BF16
#define BLOCK 32
#define BYTES 64
#elif TYPE == T_Q4_0 || TYPE == T_IQ4_NL
#define BLOCK 32
#define BYTES 18
#define ALIGNED 2
#elif TYPE == T_Q4_1
#define BLOCK 32
#define BYTES 20
#define ALIGNED 4
#elif TYPE == T_Q5_0
#define BLOCK 32
#define BYTES 22
#define ALIGNED 2
#elif TYPE == T_Q5_1
#define BLOCK 32
#define BYTES 24
#define ALIGNED 4
#elif TYPE == T_Q8_0
#define BLOCK 32
#define BYTES 34
#define ALIGNED 2
#elif TYPE == T_Q2_K
#define BLOCK 256
#define BYTES 84
#define ALIGNED 4
#elif TYPE == T_Q3_K
#define BLOCK 256
#define BYTES 110
#define ALIGNED 2
#elif TYPE == T_Q4_K
#define BLOCK 256
#define BYTES 144
#define ALIGNED 4
#elif TYPE == T_Q5_K
#define BLOCK 256
#define BYTES 176
#define ALIGNED 4
#elif TYPE == T_Q6_K
#define BLOCK 256
#define BYTES 210
#define ALIGNED 2
#elif TYPE == T_IQ4_XS
#define BLOCK 256
#define BYTES 136
#define ALIGNED 4
#elif TYPE == T_MXFP4
#define BLOCK 32
#define BYTES 17
#define ALIGNED 1
#else
#error "TYPE is no type of the list"
#endif

#if TYPE == T_F32
DEVICE float weight_at(GLOBAL const u8 *row, int i) { return ((GLOBAL const float *)row)[i]; }
#elif TYPE == T_F16
DEVICE float weight_at(GLOBAL const u8 *row, int i) { return HALF_AT(row, i); }
#elif TYPE == T_BF16
DEVICE float weight_at(GLOBAL const u8 *row, int i) { return FLOAT((u32)((GLOBAL const u16 *)row)[i] << 16); }
#endif

#if TYPE == T_F32 || TYPE == T_F16 || TYPE == T_BF16
#define IS_FLOAT
DEVICE void take(GLOBAL const u8 *p, int sub, int lane, float *w) {
  (void)sub;
  for (int i = 0; i < 4; i++) w[i] = weight_at(p, lane + i);
}
#else
DEVICE u32 four(GLOBAL const u8 *p) { // four bytes as a word
#if ALIGNED == 4
  return *(GLOBAL const u32 *)p;
#elif ALIGNED == 2
  return (u32)((GLOBAL const u16 *)p)[0] | (u32)((GLOBAL const u16 *)p)[1] << 16;
#else
  return (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
#endif
}
DEVICE int byte_of(u32 word, int i) { return (int)(word >> (8 * i) & 255u); }
#if TYPE == T_Q4_0 || TYPE == T_Q4_1 || TYPE == T_Q5_0 || TYPE == T_Q5_1 || TYPE == T_IQ4_NL || TYPE == T_MXFP4
// Low halves of sixteen bytes, then their high halves
DEVICE u32 halves(GLOBAL const u8 *q, int lane) { return (four(q + (lane & 15)) >> (lane < 16 ? 0 : 4)) & 0x0F0F0F0Fu; }
#endif
#if TYPE == T_Q4_K || TYPE == T_Q5_K
DEVICE float k_scale(GLOBAL const u8 *s, int sub) {
  return (float)(sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4);
}
DEVICE float k_min(GLOBAL const u8 *s, int sub) {
  return (float)(sub < 4 ? s[sub + 4] & 63 : s[sub + 4] >> 4 | (s[sub] >> 6) << 4);
}
#endif
#if TYPE == T_IQ4_NL || TYPE == T_IQ4_XS
CONSTANT i8 iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
#elif TYPE == T_MXFP4
CONSTANT i8 mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; // twice the E2M1 values
#endif

// Weights `lane` to lane + 3 (lane a multiple of 4, below 32) of the `sub`-th 32 weights of the block at p
DEVICE void take(GLOBAL const u8 *p, int sub, int lane, float *w) {
  int code[4];
  float scale, add = -0.0f;
#if TYPE == T_Q4_0
  u32 q = halves(p + 2, lane);
  for (int i = 0; i < 4; i++) code[i] = byte_of(q, i) - 8;
  scale = HALF_AT(p, 0);
#elif TYPE == T_Q4_1
  u32 q = halves(p + 4, lane);
  for (int i = 0; i < 4; i++) code[i] = byte_of(q, i);
  scale = HALF_AT(p, 0), add = HALF_AT(p, 1);
#elif TYPE == T_Q5_0
  u32 q = halves(p + 6, lane), high = four(p + 2) >> lane;
  for (int i = 0; i < 4; i++) code[i] = (byte_of(q, i) | (int)(high >> i & 1u) << 4) - 16;
  scale = HALF_AT(p, 0);
#elif TYPE == T_Q5_1
  u32 q = halves(p + 8, lane), high = four(p + 4) >> lane;
  for (int i = 0; i < 4; i++) code[i] = byte_of(q, i) | (int)(high >> i & 1u) << 4;
  scale = HALF_AT(p, 0), add = HALF_AT(p, 1);
#elif TYPE == T_Q8_0
  u32 q = four(p + 2 + lane);
  for (int i = 0; i < 4; i++) code[i] = (int)(i8)byte_of(q, i);
  scale = HALF_AT(p, 0);
#elif TYPE == T_Q2_K
  u32 q = four(p + 16 + sub / 4 * 32 + lane) >> (sub % 4 * 2);
  for (int i = 0; i < 4; i++) code[i] = byte_of(q, i) & 3;
  int s = p[sub * 2 + lane / 16];
  scale = HALF_AT(p + 80, 0) * (float)(s & 15), add = -(HALF_AT(p + 82, 0) * (float)(s >> 4));
#elif TYPE == T_Q3_K
  u32 q = four(p + 32 + sub / 4 * 32 + lane) >> (sub % 4 * 2), high = four(p + lane) >> sub;
  for (int i = 0; i < 4; i++) code[i] = (byte_of(q, i) & 3) - (byte_of(high, i) & 1 ? 0 : 4);
  GLOBAL const u8 *s = p + 96;
  int g = sub * 2 + lane / 16, low = g < 8 ? s[g] & 15 : s[g - 8] >> 4;
  scale = HALF_AT(p + 108, 0) * (float)((low | ((s[8 + g % 4] >> (g / 4 * 2)) & 3) << 4) - 32);
#elif TYPE == T_Q4_K
  u32 q = four(p + 16 + sub / 2 * 32 + lane) >> (sub % 2 * 4);
  for (int i = 0; i < 4; i++) code[i] = byte_of(q, i) & 15;
  scale = HALF_AT(p, 0) * k_scale(p + 4, sub), add = -(HALF_AT(p, 1) * k_min(p + 4, sub));
#elif TYPE == T_Q5_K
  u32 q = four(p + 48 + sub / 2 * 32 + lane) >> (sub % 2 * 4), high = four(p + 16 + lane) >> sub;
  for (int i = 0; i < 4; i++) code[i] = (byte_of(q, i) & 15) | (byte_of(high, i) & 1) << 4;
  scale = HALF_AT(p, 0) * k_scale(p + 4, sub), add = -(HALF_AT(p, 1) * k_min(p + 4, sub));
#elif TYPE == T_Q6_K
  u32 q = four(p + sub / 4 * 64 + sub % 2 * 32 + lane) >> (sub % 4 / 2 * 4);
  u32 high = four(p + 128 + sub / 4 * 32 + lane) >> (sub % 4 * 2);
  for (int i = 0; i < 4; i++) code[i] = ((byte_of(q, i) & 15) | (byte_of(high, i) & 3) << 4) - 32;
  scale = HALF_AT(p + 208, 0) * (float)(i8)p[192 + sub * 2 + lane / 16];
#elif TYPE == T_IQ4_NL
  u32 q = halves(p + 2, lane);
  for (int i = 0; i < 4; i++) code[i] = iq4_values[byte_of(q, i)];
  scale = HALF_AT(p, 0);
#elif TYPE == T_IQ4_XS
  u32 q = (four(p + 8 + sub * 16 + (lane & 15)) >> (lane < 16 ? 0 : 4)) & 0x0F0F0F0Fu;
  for (int i = 0; i < 4; i++) code[i] = iq4_values[byte_of(q, i)];
  int low = p[4 + sub / 2] >> (sub % 2 * 4) & 15, high = ((GLOBAL const u16 *)(p + 2))[0] >> (sub * 2) & 3;
  scale = HALF_AT(p, 0) * (float)((low | high << 4) - 32);
#elif TYPE == T_MXFP4
  u32 q = halves(p + 1, lane);
  for (int i = 0; i < 4; i++) code[i] = mxfp4_values[byte_of(q, i)];
  int e = p[0]; // 2^(e - 128): half of the E8M0 scale, since the values are doubled
  scale = FLOAT(e < 2 ? 0x00200000u << e : (u32)(e - 1) << 23);
#endif
  (void)sub;
  for (int i = 0; i < 4; i++) w[i] = FMA((float)code[i], scale, add);
}
#endif
