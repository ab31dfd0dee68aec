// Operations on one row at a time: norms, RoPE, softmax, the choice of experts. Sums are in the canonical lanes and
// tree.
#pragma once
#include "functions.h"

static void rms_norm(float *out, const float *x, const float *weight, int n, float eps) {
  float by = 1.0f / sqrtf(lanes_sum(x, n, 1) / (float)n + eps);
  V_MAP2(out, x, weight, n, v_mul(v_mul(a, v_all(by)), b));
}
static void softmax(float *x, int n) {
  float top = x[0];
  for (int i = 1; i < n; i++) top = x[i] > top || top != top ? x[i] : top;
  V_MAP(x, x, n, v_exp(v_sub(a, v_all(top))));
  float sum = lanes_sum(x, n, 0);
  V_MAP(x, x, n, v_div(a, v_all(sum)));
}
// Chosen weights by their sum, ascending, which counts as at least 2^-14
static void normalize(float *w, int n) {
  float sum = w[0];
  for (int i = 1; i < n; i++) sum += w[i];
  if (sum < 6.103515625e-5f) sum = 6.103515625e-5f;
  for (int i = 0; i < n; i++) w[i] /= sum;
}
// Turn pairs (i, i + n/2) of each head's first n values, or neighbours (2 i, 2 i + 1); the rest stays as it is.
static void rope(float *x, int heads, int width, int n, const float *cosines, const float *sines, int neighbours) {
  for (int h = 0; h < heads; h++, x += width)
    for (int i = 0; i < n / 2; i++) {
      float *first = x + (neighbours ? 2 * i : i), *second = x + (neighbours ? 2 * i + 1 : i + n / 2), a = *first,
            b = *second;
      *first = a * cosines[i] - b * sines[i];
      *second = a * sines[i] + b * cosines[i];
    }
}
// The k largest of n scores, descending, ties to the lower id; what is no number comes last.
static void top_k(const float *scores, int n, int k, int32_t *ids) {
  int have = 0;
  for (int e = 0; e < n; e++) {
    float s = scores[e] == scores[e] ? scores[e] : -INFINITY;
    if (have == k) {
      float least = scores[ids[k - 1]] == scores[ids[k - 1]] ? scores[ids[k - 1]] : -INFINITY;
      if (!(s > least)) continue;
      have--;
    }
    int at = have++;
    for (; at > 0; at--) {
      float before = scores[ids[at - 1]] == scores[ids[at - 1]] ? scores[ids[at - 1]] : -INFINITY;
      if (!(s > before)) break;
      ids[at] = ids[at - 1];
    }
    ids[at] = e;
  }
}
static void merge(float *out, const float *rows, int32_t stride, const float *weights, int k, int n) {
  V_MAP(out, rows, n, v_mul(a, v_all(weights[0])));
  for (int i = 1; i < k; i++) V_MAP2(out, out, rows + (ptrdiff_t)i * stride, n, v_add(a, v_mul(b, v_all(weights[i]))));
}
static int is_finite(const float *x, int n) {
  uint32_t bad = 0;
  for (int i = 0; i < n; i++) bad |= (float_to_bits(x[i]) & 0x7F800000u) == 0x7F800000u;
  return !bad;
}
