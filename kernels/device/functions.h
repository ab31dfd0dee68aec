// exp and what is made of it, division and square root: from FMA, integers and comparisons alone, so that the bits are
// those of the CPU's kernels. EXACT_DIVIDE: the device's own division and root are correctly rounded.

DEVICE float divide(float a, float b) {
#if defined(EXACT_DIVIDE)
  return a / b;
#else
  u32 x = BITS(a) & 0x7FFFFFFFu, y = BITS(b) & 0x7FFFFFFFu, sign = (BITS(a) ^ BITS(b)) & 0x80000000u;
  if (x > 0x7F800000u || y > 0x7F800000u) return FLOAT(0x7FC00000u);
  if (x == 0x7F800000u) return FLOAT(y == 0x7F800000u ? 0x7FC00000u : sign | 0x7F800000u);
  if (y == 0) return FLOAT(x == 0 ? 0x7FC00000u : sign | 0x7F800000u);
  if (x == 0 || y == 0x7F800000u) return FLOAT(sign);
  int p = (int)(x >> 23), q = (int)(y >> 23);
  u32 m = x & 0x7FFFFFu, n = y & 0x7FFFFFu;
  if (p)
    m |= 0x800000u;
  else
    for (p = 1; !(m & 0x800000u); p--) m <<= 1;
  if (q)
    n |= 0x800000u;
  else
    for (q = 1; !(n & 0x800000u); q--) n <<= 1;
  int e = p - q + 127;
  if (m < n) m <<= 1, e--;
  u32 result = 0; // 26 bits: 24 of the quotient, and two below them
  for (int i = 0; i < 26; i++) {
    result <<= 1;
    if (m >= n) m -= n, result |= 1;
    m <<= 1;
  }
  result |= m != 0; // what is left decides how a tie is rounded
  if (e <= 0) {     // subnormal: its unit is fixed
    int by = 1 - e;
    result = by > 26 ? 1u : (result >> by) | ((result & ((1u << by) - 1u)) != 0);
    e = 1;
    if (by > 26) return FLOAT(sign);
  }
  u32 rest = result & 3u, whole = result >> 2;
  whole += rest > 2u || (rest == 2u && (whole & 1u));
  // The leading bit of a normal number adds one to the exponent; that of a subnormal is not there.
  u32 bits = ((u32)(e - 1) << 23) + whole;
  return FLOAT(sign | (e >= 255 || bits >= 0x7F800000u ? 0x7F800000u : bits));
#endif
}
DEVICE float square_root(float a) {
#if defined(EXACT_DIVIDE)
  return FAST_SQRT(a);
#else
  u32 x = BITS(a);
  if (x == 0 || x == 0x80000000u || x == 0x7F800000u) return a;
  if (x >= 0x7F800000u) return FLOAT(0x7FC00000u); // below zero, or no number
  int e = (int)(x >> 23);
  u32 m = x & 0x7FFFFFu;
  if (e)
    m |= 0x800000u;
  else
    for (e = 1; !(m & 0x800000u); e--) m <<= 1;
  e -= 127;
  if (e & 1) m <<= 1, e--; // the value is m * 2^-23 * 2^e, e even: m has 24 or 25 bits
  // Two bits of m a step: 13 steps of what is there (m * 2), then zeros, for 26 bits of the root
  u32 root = 0, rest = 0;
  m <<= 1; // 26 bits: an even number of them, two for each bit of the whole part
  for (int i = 0; i < 26; i++) {
    rest = (rest << 2) | (i < 13 ? (m >> (24 - 2 * i)) & 3u : 0u);
    u32 trial = (root << 2) | 1u;
    root <<= 1;
    if (rest >= trial) rest -= trial, root |= 1u;
  }
  // root is floor(sqrt(m * 2 * 2^26)): its leading bit is bit 25
  root |= rest != 0;
  u32 whole = root >> 2, low = root & 3u;
  whole += low > 2u || (low == 2u && (whole & 1u));
  return FLOAT(((u32)(e / 2 + 127 - 1) << 23) + whole);
#endif
}

// e^x: Cody-Waite reduction, degree 6; below 1 ulp. Under -86 it is e^-86 (4.5e-38); it overflows to infinity where e^x
// does.
DEVICE float exponential(float x) {
  x = -86.0f > x ? -86.0f : x;
  x = 89.0f < x ? 89.0f : x;
  float j = FMA(x, 1.442695041f, 12582912.0f) - 12582912.0f;
  float f = FMA(j, -6.93145752e-1f, x);
  f = FMA(j, -1.42860677e-6f, f);
  float p = FMA(1.37805939e-3f, f, 8.37312452e-3f);
  p = FMA(p, f, 4.16695364e-2f);
  p = FMA(p, f, 1.66664720e-1f);
  p = FMA(p, f, 4.99999851e-1f);
  p = FMA(p, f, 1.0f);
  p = FMA(p, f, 1.0f);
  p = p * (j == j ? FLOAT((u32)((int)j + 126) << 23) : j);
  return p + p;
}
DEVICE float sigmoid(float x) { return divide(1.0f, 1.0f + exponential(-x)); }
DEVICE float silu(float x) { return divide(x, 1.0f + exponential(-x)); }
// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u): nothing cancels.
DEVICE float gelu_tanh(float x) {
  float u = x * FMA(x * x, 0.0356774081f, 0.797884561f); // sqrt(2 / pi) (x + 0.044715 x^3)
  return divide(x, 1.0f + exponential(-2.0f * u));
}
DEVICE float with_sign(float x, float sign) { return FLOAT((BITS(x) & 0x7FFFFFFFu) | (BITS(sign) & 0x80000000u)); }
// Odd polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel (Cephes, tanhf).
DEVICE float hyperbolic_tangent(float x) {
  float a = with_sign(x, 0.0f), z = x * x;
  float p = FMA(-5.70498872745e-3f, z, 2.06390887954e-2f);
  p = FMA(p, z, -5.37397155531e-2f);
  p = FMA(p, z, 1.33314422036e-1f);
  p = FMA(p, z, -3.33332819422e-1f);
  float small = FMA(p * z, x, x);
  float large = 1.0f - divide(2.0f, exponential(a + a) + 1.0f);
  return a < 0.625f ? small : with_sign(large, x);
}
// erf in two ranges: a polynomial, and 1 - e^(polynomial) (after N. Juffa's erff).
DEVICE float error_function(float x) {
  float t = with_sign(x, 0.0f);
  t = 4.0f < t ? 4.0f : t;
  float s = t * t;
  float r = FMA(-1.72853470e-5f, t, 3.83197126e-4f);
  float u = FMA(-3.88396438e-3f, t, 2.42546219e-2f);
  r = FMA(r, s, u);
  r = FMA(r, t, -1.06777877e-1f);
  r = FMA(r, t, -6.34846687e-1f);
  r = FMA(r, t, -1.28717512e-1f);
  r = FMA(r, t, -t);
  float large = with_sign(1.0f - exponential(r), x);
  float p = FMA(-5.96761703e-4f, s, 4.99119423e-3f);
  p = FMA(p, s, -2.67681349e-2f);
  p = FMA(p, s, 1.12819925e-1f);
  p = FMA(p, s, -3.76125336e-1f);
  p = FMA(p, s, 1.28379166e-1f);
  return t < 0.927734375f ? FMA(p, x, x) : large;
}
DEVICE float gelu(float x) { return 0.5f * x * (1.0f + error_function(x * 0.707106781f)); }
DEVICE float relu(float x) { return 0.0f > x ? 0.0f : x; }

enum activation { SILU, GELU, GELU_TANH, RELU };
DEVICE float activate(int word, float x) {
  return word == SILU ? silu(x) : word == GELU ? gelu(x) : word == GELU_TANH ? gelu_tanh(x) : relu(x);
}

// Lanes added in the tree i + (i + 16), + 8, + 4, + 2, + 1
DEVICE float tree(LOCAL float *lane) {
  for (int step = LANES / 2; step; step >>= 1)
    for (int i = 0; i < step; i++) lane[i] = lane[i] + lane[i + step];
  return lane[0];
}
