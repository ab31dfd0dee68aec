// The canonical order once more, as plainly as it can be written: what every variant's results are held to.
#pragma once

static float spec_tree_of(const float *lanes, int n) {
  float s[LANES];
  memcpy(s, lanes, sizeof(float) * (size_t)n);
  for (int step = n / 2; step; step /= 2)
    for (int i = 0; i < step; i++) s[i] = s[i] + s[i + step];
  return s[0];
}
static float spec_tree(const float *lanes) { return spec_tree_of(lanes, LANES); }
static float spec_dot(const float *w, const float *x, int k) {
  float lane[LANES] = {0};
  for (int j = 0; j < k; j++) lane[j % LANES] = fmaf(w[j], x[j], lane[j % LANES]);
  return spec_tree(lane);
}
static float spec_exp(float x) {
  if (x != x) return x;
  x = x < -86.0f ? -86.0f : x > 89.0f ? 89.0f : x;
  float j = fmaf(x, 1.442695041f, 12582912.0f) - 12582912.0f;
  float f = fmaf(j, -1.42860677e-6f, fmaf(j, -6.93145752e-1f, x)), p = 1.37805939e-3f;
  static const float c[] = {8.37312452e-3f, 4.16695364e-2f, 1.66664720e-1f, 4.99999851e-1f, 1.0f, 1.0f};
  for (int i = 0; i < 6; i++) p = fmaf(p, f, c[i]);
  float half_power = bits_to_float((uint32_t)((int)j + 126) << 23);
  return p * half_power + p * half_power;
}
static float spec_silu(float x) { return x / (1.0f + spec_exp(-x)); }
static float spec_sigmoid(float x) { return 1.0f / (1.0f + spec_exp(-x)); }
static float spec_gelu_tanh(float x) {
  float u = x * fmaf(x * x, 0.0356774081f, 0.797884561f);
  return x / (1.0f + spec_exp(-2.0f * u));
}
static float spec_relu(float x) { return 0.0f > x ? 0.0f : x; }
static float spec_tanh(float x) {
  float a = fabsf(x), z = x * x, p = -5.70498872745e-3f;
  static const float c[] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
  for (int i = 0; i < 4; i++) p = fmaf(p, z, c[i]);
  return a < 0.625f ? fmaf(p * z, x, x) : copysignf(1.0f - 2.0f / (spec_exp(a + a) + 1.0f), x);
}
static float spec_gelu(float x) {
  float y = x * 0.707106781f, t = fabsf(y) < 4.0f ? fabsf(y) : y != y ? y : 4.0f, s = t * t, erf;
  if (t < 0.927734375f) {
    float p = -5.96761703e-4f;
    static const float c[] = {4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f};
    for (int i = 0; i < 5; i++) p = fmaf(p, s, c[i]);
    erf = fmaf(p, y, y);
  } else {
    float r = fmaf(fmaf(-1.72853470e-5f, t, 3.83197126e-4f), s, fmaf(-3.88396438e-3f, t, 2.42546219e-2f));
    static const float c[] = {-1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f};
    for (int i = 0; i < 3; i++) r = fmaf(r, t, c[i]);
    erf = copysignf(1.0f - spec_exp(fmaf(r, t, -t)), y);
  }
  return 0.5f * x * (1.0f + erf);
}
static void spec_rms_norm(float *out, const float *x, const float *weight, int n, float eps) {
  float by = 1.0f / sqrtf(spec_dot(x, x, n) / (float)n + eps);
  for (int i = 0; i < n; i++) out[i] = x[i] * by * weight[i];
}
static void spec_softmax(float *x, int n) {
  float top = x[0], lane[LANES] = {0};
  for (int i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
  for (int i = 0; i < n; i++) lane[i % LANES] += x[i] = spec_exp(x[i] - top);
  float sum = spec_tree(lane);
  for (int i = 0; i < n; i++) x[i] /= sum;
}
// To the nearest F16, ties to even: a whole number of the units that the last place has at this size
static uint16_t spec_half(float x) {
  uint16_t sign = (uint16_t)(float_to_bits(x) >> 16 & 0x8000);
  float a = fabsf(x);
  int exponent;
  if (a != a) return sign | 0x7E00;
  if (a >= 65520.0f) return sign | 0x7C00;
  frexpf(a, &exponent); // a < 2^exponent, but for 0
  int unit = a < 0x1p-13f ? -24 : exponent - 11;
  return (uint16_t)(sign | (((unit + 24) << 10) + (int)rintf(ldexpf(a, -unit))));
}
// One head of one row: q[width] against keys[end][width] and values[end][value_width], from key `start` on.
static void spec_attention(float *out, const attention *t, int head, const float *q, const float *keys,
                           const float *values, int start, int end) {
  float *e = malloc(sizeof(float) * (size_t)end), lane[LANES] = {0}, top = t->sinks ? t->sinks[head] : -INFINITY;
  for (int p = start; p < end; p++) {
    e[p] = spec_dot(q, keys + (ptrdiff_t)p * t->width, t->width) * t->scale;
    if (t->softcap > 0) e[p] = t->softcap * spec_tanh(e[p] / t->softcap);
    top = e[p] > top ? e[p] : top;
  }
  for (int p = start; p < end; p++) lane[p % LANES] += e[p] = spec_exp(e[p] - top);
  float sum = spec_tree(lane);
  if (t->sinks) sum += spec_exp(t->sinks[head] - top);
  for (int d = 0; d < t->value_width; d++) {
    float total = 0, some = 0;
    for (int p = start, blocks = 0; p < end; p++) {
      some = fmaf(e[p], values[(ptrdiff_t)p * t->value_width + d], some);
      if (p % 256 == 255 || p + 1 == end) total = blocks++ ? total + some : some, some = 0;
    }
    out[d] = total / sum;
  }
  free(e);
}
// ---- the i16 class

// Whole numbers v[k] with zeros up to a multiple of 64, and the scale of each 32 of them: the largest is 127 x 256
static void spec_quantise(const float *x, int k, int32_t *v, float *scale) {
  for (int b = 0; b < (k + 63) / 64 * 2; b++) {
    float top = 0;
    for (int i = b * 32; i < b * 32 + 32 && i < k; i++)
      top = fabsf(x[i]) < INFINITY && top == top ? (fabsf(x[i]) > top ? fabsf(x[i]) : top) : NAN;
    scale[b] = top < 1e-30f ? 0 : top / 32512.0f; // what is not finite makes every product that
    for (int i = b * 32; i < b * 32 + 32; i++)
      v[i] = i < k && scale[b] > 0 ? (int32_t)rintf(x[i] * (1.0f / scale[b])) : 0;
  }
}
// A row of weights likewise: whole numbers, and of each 16 the scale and what is added to each weight
static void spec_weights(const matrix *m, int row, int32_t *code, float *scale, float *add) {
  const uint8_t *p = m->data + (ptrdiff_t)row * m->row_bytes;
  memset(code, 0, sizeof(int32_t) * (size_t)((m->cols + 63) / 64 * 64));
  memset(scale, 0, sizeof(float) * (size_t)((m->cols + 63) / 64 * 4));
  memset(add, 0, sizeof(float) * (size_t)((m->cols + 63) / 64 * 4));
  for (int b = 0; b < m->cols / 32; b++) {
    sub_block s = {{0}, {0}, {0}};
    switch (m->type) {
#define X(T, WEIGHTS, BYTES_) \
  case T: T##_sub(p + b / (WEIGHTS / 32) * BYTES_, b % (WEIGHTS / 32), &s); break;
      FOR_EACH_QUANT(X)
#undef X
    }
    for (int i = 0; i < 32; i++) code[b * 32 + i] = s.code[i];
    for (int h = 0; h < 2; h++) scale[b * 2 + h] = s.scale[h], add[b * 2 + h] = s.add[h];
  }
}
// One row of weights by one row of activations; `filled_k` is a multiple of 64
static float spec_i16_dot(int type, const int32_t *code, const float *scale, const float *add, const int32_t *v,
                          const float *x_scale, int filled_k) {
  float lane[16] = {0}, low[16] = {0};
  int each = 0, lanes = 16; // activations that a minimum is multiplied with at once
  for (int g = 0; g < filled_k / 4; g++) {
    int32_t four = 0;
    for (int i = 4 * g; i < 4 * g + 4; i++) four += code[i] * v[i];
    lane[g % 16] = fmaf((float)four, scale[g / 4] * x_scale[g / 8], lane[g % 16]);
  }
  if (type == Q4_1 || type == Q5_1) each = 4;
  if (type == Q2_K) each = 16;
  if (type == Q4_K || type == Q5_K) each = 32, lanes = 8;
  if (!each) return spec_tree_of(lane, 16);
  for (int g = 0; g < filled_k / each; g++) {
    int32_t sum = 0;
    for (int i = g * each; i < (g + 1) * each; i++) sum += v[i];
    low[g % lanes] = fmaf((float)sum, add[g * each / 16] * x_scale[g * each / 32], low[g % lanes]);
  }
  return spec_tree_of(lane, 16) + spec_tree_of(low, lanes);
}

// ---- either class

// out[c][r] of a matrix and n rows x[c] of its columns. w: its weights as F32, [rows][filled cols]
static void spec_products(float *out, const matrix *m, const float *w, const float *x, int n, int is_i16) {
  int k = m->cols, filled_k = (k + 63) / 64 * 64;
  int32_t *v = malloc(sizeof(int32_t) * (size_t)(filled_k * (n + 1))), *code = v + filled_k * n;
  float *scale = malloc(sizeof(float) * (size_t)(filled_k / 32 * (n + 4))), *own = scale + filled_k / 32 * n,
        *add = own + filled_k / 16;
  is_i16 = is_i16 && m->type != F32 && m->type != F16 && m->type != BF16;
  for (int c = 0; c < n && is_i16; c++)
    spec_quantise(x + (ptrdiff_t)c * k, k, v + c * filled_k, scale + c * (filled_k / 32));
  for (int r = 0; r < m->rows; r++) {
    if (is_i16) spec_weights(m, r, code, own, add);
    for (int c = 0; c < n; c++)
      out[(ptrdiff_t)c * m->rows + r] =
          is_i16 ? spec_i16_dot(m->type, code, own, add, v + c * filled_k, scale + c * (filled_k / 32), filled_k)
                 : spec_dot(w + (ptrdiff_t)r * filled(k), x + (ptrdiff_t)c * k, k);
  }
  free(v);
  free(scale);
}
// One pair: down (activation(gate x) * (up x)); weights: those of the three as F32
static void spec_expert(float *out, const bank *b, const expert *e, float *const *weights, const float *x, int is_i16) {
  static float (*const words[])(float) = {spec_silu, spec_gelu, spec_gelu_tanh, spec_relu};
  float *h = malloc(sizeof(float) * (size_t)b->hidden * 2), *u = h + b->hidden;
  spec_products(h, &e->gate, weights[0], x, 1, is_i16);
  spec_products(u, &e->up, weights[1], x, 1, is_i16);
  for (int i = 0; i < b->hidden; i++) {
    if (e->gate_bias) h[i] += e->gate_bias[i];
    if (e->up_bias) u[i] += e->up_bias[i];
    h[i] = words[b->activation](h[i]) * u[i];
  }
  spec_products(out, &e->down, weights[2], h, 1, is_i16);
  for (int i = 0; i < b->outputs && e->down_bias; i++) out[i] += e->down_bias[i];
  free(h);
}
