// The i16 class: rows of activations as integers, and products with them. Rows and experts of it are in
// driver_experts.h.
#pragma once

// Rows that are easily got wrong, in turn: zeros of either sign, too small for a scale, subnormal, the smallest and the
// largest that have one, infinite and no number in one block
#define ODD_ROWS 9
static float *odd_rows(int k) {
  float *x = random_floats((int64_t)ODD_ROWS * k, -6, 1);
  for (int row = 0; row < ODD_ROWS; row++)
    for (int i = 0; i < k; i++) {
      float *at = x + (ptrdiff_t)row * k + i, sign = i % 3 ? 1 : -1;
      int is_block = i / LANES % 3 == 1; // others are as they were
      switch (row) {
      case 0: *at = 0 * sign; break;
      case 1: *at = is_block ? 0 * sign : *at; break;
      case 2: *at = is_block ? 9.9999e-31f * sign : *at; break;
      case 3: *at = is_block ? bits_to_float(random_bits() & 0x807FFFFFu) : *at; break;
      case 4: *at = is_block ? 1.0001e-30f * sign / (float)(1 + i % 5) : *at; break;
      case 5: *at = is_block ? 3.4e38f * sign / (float)(1 + i % 7) : *at; break;
      case 6: *at = is_block && i % LANES == 5 ? -INFINITY : *at; break;
      case 7: *at = i == k - 1 ? bits_to_float(0xFFC00000u) : *at; break;
      case 8:
        *at = (float)(i % LANES * 2 - 31) * (i % LANES == 31 ? 0x1p15f : 0.5f);
        break; // halves of what is a whole number
      }
    }
  return x;
}
static void quantise_case(int k, int is_odd) {
  name_case("quantise%s k%d", is_odd ? " odd rows" : "", k);
  int rows = is_odd ? ODD_ROWS : 5, n = chunked(k), each = (int)quantised_floats(k);
  float *x = is_odd ? odd_rows(k) : random_floats((int64_t)rows * k, -9, 3), *whole = floats((int64_t)rows * each),
        *parts = floats(each);
  step s = {.op = QUANTISE, .in = {0, -1, -1}, .out = 1, .width = k, .out_width = each};
  go(&s, 1, &(run){.rows = rows, .slots = (float *[]){x, whole}});
  int32_t *v = room(sizeof(int32_t) * (size_t)n);
  float *scale = floats(n / 32), *all = floats((int64_t)rows * (n + n / 32)), *got = floats(n), *want = floats(n);
  for (int row = 0; row < rows; row++) {
    quantised q = quantised_at(whole + (ptrdiff_t)row * each, k), p = quantised_at(parts, k);
    spec_quantise(x + (ptrdiff_t)row * k, k, v, scale);
    float *result = all + (ptrdiff_t)row * (n + n / 32);
    for (int i = 0; i < n; i++) result[i] = (float)(256 * q.hi[i] + q.lo[i]), want[i] = (float)v[i];
    for (int b = 0; b < n / 32; b++) result[n + b] = q.scale32[b];
    must(case_name, "the specification", result, want, n);
    must(case_name, "the specification", q.scale32, scale, n / 32);
#define SUMS(GOT, EACH, SCALE)                                       \
  for (int g = 0; g < n / EACH; g++) {                               \
    int32_t sum = 0;                                                 \
    for (int i = 0; i < EACH; i++) sum += v[g * EACH + i];           \
    got[g] = (float)(GOT)[g], want[g] = (float)sum;                  \
  }                                                                  \
  must(case_name, "the sum of " #EACH, got, want, n / EACH);         \
  for (int g = 0; g < n / EACH; g++) want[g] = scale[g * EACH / 32]; \
  must(case_name, "the scale of " #EACH, SCALE, want, n / EACH);
    SUMS(q.four, 4, q.scale)
    SUMS(q.fours, 4, q.scale)
    SUMS(q.sum16, 16, q.scale16)
    SUMS(q.sum32, 32, q.scale32)
#undef SUMS
    quantise(x + (ptrdiff_t)row * k, 0, k / 64 * 32, k, &p); // in two parts, as experts do it
    quantise(x + (ptrdiff_t)row * k, k / 64 * 32, k, k, &p);
    must(case_name, "the row in two parts", p.scale32, q.scale32, n / 32);
    for (int i = 0; i < n; i++) got[i] = (float)(256 * p.hi[i] + p.lo[i]), want[i] = (float)v[i];
    must(case_name, "the row in two parts", got, want, n);
  }
  say_any(case_name, all, (int64_t)rows * (n + n / 32));
  let_go();
}
static void i16_matmul(const matrix *m, const float *x, int n, float *out) {
  int k = m->cols, each = (int)quantised_floats(k);
  float *in = floats((int64_t)n * k),
        *slots[] = {memcpy(in, x, sizeof(float) * (size_t)n * (size_t)k), floats((int64_t)n * each), out};
  step steps[] = {{.op = QUANTISE, .in = {0, -1, -1}, .out = 1, .width = k, .out_width = each},
                  {.op = MATMUL, .meet = 1, .in = {0, 1, -1}, .out = 2, .width = k, .out_width = m->rows, .m = *m}};
  go(steps, 2, &(run){.rows = n, .slots = slots});
}
static void i16_case(int type, const char *word, int rows, int k, const int *widths) {
  name_case("matmul i16 %s k%d", word, k);
  matrix m = random_matrix(type, rows, k);
  int most = *widths;
  float *x = random_floats((int64_t)most * k, -2, 2), *first = 0, *w = dequantised(&m), *want = floats(rows),
        *in_f32 = floats(rows);
  for (; *widths; widths++) {
    int n = *widths;
    char name[160];
    snprintf(name, sizeof name, "%s x %d", case_name, n);
    float *out = floats((int64_t)n * rows);
    i16_matmul(&m, x, n, out);
    say(name, out, (int64_t)n * rows);
    if (first) {
      must(name, "the widest product", out, first, (int64_t)n * rows);
      continue;
    }
    first = out; // the widest comes first, and is held to the specification
    for (int c = 0; c < n; c += n > 9 ? 37 : 4) {
      spec_products(want, &m, w, x + (ptrdiff_t)c * k, 1, 1);
      must(name, "the specification", out + (ptrdiff_t)c * rows, want, rows);
      spec_products(in_f32, &m, w, x + (ptrdiff_t)c * k, 1, 0);
      about(want, in_f32, rows);
    }
  }
  must_be_near(case_name, I16_BAR);
  let_go();
}
static void i16_odd_case(int type, const char *word, int k) {
  name_case("matmul i16 odd rows %s k%d", word, k);
  matrix m = random_matrix(type, 17, k);
  float *x = odd_rows(k), *w = dequantised(&m), *out = floats(ODD_ROWS * 17), *want = floats(ODD_ROWS * 17);
  i16_matmul(&m, x, ODD_ROWS, out);
  spec_products(want, &m, w, x, ODD_ROWS, 1);
  say_any(case_name, out, ODD_ROWS * 17);
  must(case_name, "the specification", out, want, ODD_ROWS * 17);
  for (int row = 0; row < ODD_ROWS; row++) {
    i16_matmul(&m, x + (ptrdiff_t)row * k, 1, out);
    must(case_name, "the specification", out, want + row * 17, 17);
  }
  let_go();
}
static void integers(void) {
  static const int all[] = {256, 64, 9, 8, 2, 1, 0}, few[] = {9, 2, 1, 0}, lengths[] = {32, 50, 96, 256, 544, 2048};
  for (int i = 0; i < 6; i++) quantise_case(lengths[i], 0), quantise_case(lengths[i], 1);
#define X(T, WEIGHTS, BYTES_)                                                        \
  i16_case(T, #T, T == Q8_0 || T == Q4_K ? 53 : 19, WEIGHTS == 32 ? 544 : 512, all); \
  i16_case(T, #T, 19, 256, few);                                                     \
  if (WEIGHTS == 32) i16_case(T, #T, 20, 576, few), i16_case(T, #T, 15, 96, few);    \
  i16_case(T, #T, 21, 2048, few);                                                    \
  i16_odd_case(T, #T, WEIGHTS == 32 ? 160 : 256);
  FOR_EACH_QUANT(X)
#undef X
}
