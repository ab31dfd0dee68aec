// The canonical order once more, as plainly as it can be written: what every variant's results are held to.
#pragma once

static float spec_tree(const float *lanes) {
  float s[LANES];
  memcpy(s, lanes, sizeof s);
  for (int step = 16; step; step /= 2)
    for (int i = 0; i < step; i++) s[i] = s[i] + s[i + step];
  return s[0];
}
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
// One head of one row: q[width] against keys[end][width] and values[end][value_width], from key `start` on.
static void spec_attention(float *out, const attention *t, int head, const float *q, const float *keys, const float *values, int start, int end) {
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
// One pair: down (activation(gate x) * (up x)) with weights that are dequantised, [rows][filled cols]
static void spec_expert(float *out, const bank *b, const expert *e, const float *gate, const float *up, const float *down, const float *x) {
  static float (*const words[])(float) = {spec_silu, spec_gelu, spec_gelu_tanh, spec_relu};
  float *h = malloc(sizeof(float) * (size_t)b->hidden);
  for (int i = 0; i < b->hidden; i++) {
    float g = spec_dot(gate + (ptrdiff_t)i * filled(b->inputs), x, b->inputs), u = spec_dot(up + (ptrdiff_t)i * filled(b->inputs), x, b->inputs);
    if (e->gate_bias) g += e->gate_bias[i];
    if (e->up_bias) u += e->up_bias[i];
    h[i] = words[b->activation](g) * u;
  }
  for (int i = 0; i < b->outputs; i++) {
    out[i] = spec_dot(down + (ptrdiff_t)i * filled(b->hidden), h, b->hidden);
    if (e->down_bias) out[i] += e->down_bias[i];
  }
  free(h);
}
