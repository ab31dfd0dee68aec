// exp and what is made of it, from FMA and correctly rounded division alone: the same bits on every device.
#pragma once
#include "lanes.h"

// e^x: Cody-Waite reduction, degree 6; below 1 ulp. Under -86 it is e^-86 (4.5e-38); it overflows to infinity where e^x
// does.
INLINE V v_exp(V x) {
  x = v_min(v_all(89.0f), v_max(v_all(-86.0f), x));
  V j = v_sub(v_fma(x, v_all(1.442695041f), v_all(12582912.0f)), v_all(12582912.0f));
  V f = v_fma(j, v_all(-6.93145752e-1f), x);
  f = v_fma(j, v_all(-1.42860677e-6f), f);
  V p = v_fma(v_all(1.37805939e-3f), f, v_all(8.37312452e-3f));
  p = v_fma(p, f, v_all(4.16695364e-2f));
  p = v_fma(p, f, v_all(1.66664720e-1f));
  p = v_fma(p, f, v_all(4.99999851e-1f));
  p = v_fma(p, f, v_all(1.0f));
  p = v_fma(p, f, v_all(1.0f));
  p = v_mul(p, v_half_power(j));
  return v_add(p, p);
}
INLINE V v_negated(V x) { return v_sub(v_all(-0.0f), x); }
INLINE V v_sigmoid(V x) { return v_div(v_all(1.0f), v_add(v_all(1.0f), v_exp(v_negated(x)))); }
INLINE V v_silu(V x) { return v_div(x, v_add(v_all(1.0f), v_exp(v_negated(x)))); }
// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u): nothing cancels.
INLINE V v_gelu_tanh(V x) {
  V u = v_mul(x, v_fma(v_mul(x, x), v_all(0.0356774081f), v_all(0.797884561f))); // sqrt(2 / pi) (x + 0.044715 x^3)
  return v_div(x, v_add(v_all(1.0f), v_exp(v_mul(v_all(-2.0f), u))));
}
// Odd polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel (Cephes, tanhf).
INLINE V v_tanh(V x) {
  V a = v_abs(x), z = v_mul(x, x);
  V p = v_fma(v_all(-5.70498872745e-3f), z, v_all(2.06390887954e-2f));
  p = v_fma(p, z, v_all(-5.37397155531e-2f));
  p = v_fma(p, z, v_all(1.33314422036e-1f));
  p = v_fma(p, z, v_all(-3.33332819422e-1f));
  V small = v_fma(v_mul(p, z), x, x);
  V large = v_sub(v_all(1.0f), v_div(v_all(2.0f), v_add(v_exp(v_add(a, a)), v_all(1.0f))));
  return v_where_less(a, v_all(0.625f), small, v_with_sign(large, x));
}
// erf in two ranges: a polynomial, and 1 - e^(polynomial) (after N. Juffa's erff).
INLINE V v_erf(V x) {
  V t = v_min(v_all(4.0f), v_abs(x)), s = v_mul(t, t);
  V r = v_fma(v_all(-1.72853470e-5f), t, v_all(3.83197126e-4f));
  V u = v_fma(v_all(-3.88396438e-3f), t, v_all(2.42546219e-2f));
  r = v_fma(r, s, u);
  r = v_fma(r, t, v_all(-1.06777877e-1f));
  r = v_fma(r, t, v_all(-6.34846687e-1f));
  r = v_fma(r, t, v_all(-1.28717512e-1f));
  r = v_fma(r, t, v_negated(t));
  V large = v_with_sign(v_sub(v_all(1.0f), v_exp(r)), x);
  V p = v_fma(v_all(-5.96761703e-4f), s, v_all(4.99119423e-3f));
  p = v_fma(p, s, v_all(-2.67681349e-2f));
  p = v_fma(p, s, v_all(1.12819925e-1f));
  p = v_fma(p, s, v_all(-3.76125336e-1f));
  p = v_fma(p, s, v_all(1.28379166e-1f));
  return v_where_less(t, v_all(0.927734375f), v_fma(p, x, x), large);
}
INLINE V v_gelu(V x) { return v_mul(v_mul(v_all(0.5f), x), v_add(v_all(1.0f), v_erf(v_mul(x, v_all(0.707106781f))))); }
INLINE V v_relu(V x) { return v_max(v_all(0.0f), x); }

// Sum of n values, or of their squares, in the canonical lanes and tree
static float lanes_sum(const float *x, int n, int squares) {
  V acc[NV];
  for (int i = 0; i < NV; i++) acc[i] = v_all(0);
  for (int at = 0; at < n; at += LANES) {
    float rest[LANES] = {0};
    const float *from = x + at;
    if (n - at < LANES) from = memcpy(rest, from, sizeof(float) * (size_t)(n - at));
    for (int i = 0; i < NV; i++) {
      V a = v_load(from + i * VL);
      acc[i] = squares ? v_fma(a, a, acc[i]) : v_add(acc[i], a);
    }
  }
  return v_tree(acc);
}
