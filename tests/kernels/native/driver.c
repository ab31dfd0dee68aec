// What one build of the kernels computes: a digest a line, compared with those in tests/golden/native. Also held, bit
// for bit, to spec.h, and to the rule that a row's result does not depend on the rows around it. `driver [threads]`;
// exits with 1 where something did not hold.
#include "program.c"

#include "inputs.h"
#include "spec.h"

#define I16_BAR 5e-5 // of a relative L2 distance to the F32 class

static pool *threads;
static void go(const step *steps, int count, run *r) {
  if (swarm_run(threads, steps, count, r)) {
    fprintf(stderr, "%s: no memory\n", case_name);
    exit(2);
  }
  if (r->bad_layer >= 0) {
    fprintf(stderr, "%s: not finite\n", case_name);
    failures++;
  }
}
static float *dequantised(const matrix *m) {
  float *w = floats((int64_t)m->rows * filled(m->cols));
  swarm_dequantise(m, w);
  return w;
}

// ---- blocks and products

static void dequantise_case(int type, const char *word, int cols) {
  name_case("dequantise %s k%d", word, cols);
  matrix m = random_matrix(type, 16, cols);
  say(case_name, dequantised(&m), (int64_t)m.rows * filled(cols));
  let_go();
}
static void every_half(int type, const char *word) {
  name_case("dequantise %s every value", word);
  uint16_t *all = room(2 * 65536);
  for (int i = 0; i < 65536; i++) all[i] = (uint16_t)i;
  matrix m = {(const uint8_t *)all, type, 1, 65536, 2 * 65536};
  say_any(case_name, dequantised(&m), 65536);
  let_go();
}
static void embed_case(int type, const char *word, int cols) {
  name_case("embed %s k%d", word, cols);
  matrix m = random_matrix(type, 5, cols);
  float *slots[] = {floats((int64_t)3 * cols)}, *w = dequantised(&m);
  step s = {.op = EMBED, .in = {-1, -1, -1}, .out = 0, .out_width = cols, .m = m};
  go(&s, 1, &(run){.rows = 3, .tokens = (int32_t[]){4, 0, 4}, .slots = slots});
  say(case_name, slots[0], (int64_t)3 * cols);
  for (int i = 0; i < 3; i++)
    must(case_name, "dequantisation", slots[0] + i * cols, w + (i == 1 ? 0 : 4) * filled(cols), cols);
  let_go();
}
static void product_case(int type, const char *word, int rows, int k, const int *widths) {
  name_case("matmul %s k%d", word, k);
  matrix m = random_matrix(type, rows, k);
  int most = 0;
  for (const int *w = widths; *w; w++) most = *w > most ? *w : most;
  float *x = random_floats((int64_t)most * k, -8, 2), *first = 0, *w = dequantised(&m), *want = floats(rows);
  for (; *widths; widths++) {
    int n = *widths;
    char name[160];
    snprintf(name, sizeof name, "%s x %d", case_name, n);
    float *in = floats((int64_t)n * k), *out = floats((int64_t)n * rows), *slots[] = {in, out};
    memcpy(in, x, sizeof(float) * (size_t)n * (size_t)k);
    step s = {.op = MATMUL, .in = {0, -1, -1}, .out = 1, .width = k, .out_width = rows, .m = m};
    go(&s, 1, &(run){.rows = n, .slots = slots});
    say(name, out, (int64_t)n * rows);
    if (first) {
      must(name, "the widest product", out, first, (int64_t)n * rows);
      continue;
    }
    first = out; // the widest comes first, and is held to the specification
    for (int c = 0; c < n; c += n > 9 ? 37 : 4) {
      for (int r = 0; r < rows; r++) want[r] = spec_dot(w + (ptrdiff_t)r * filled(k), x + (ptrdiff_t)c * k, k);
      must(name, "the specification", out + (ptrdiff_t)c * rows, want, rows);
    }
  }
  let_go();
}

// ---- functions

#define SWEEP 131072
static void sweep_values(float *x, int fine) {
  for (int i = 0; i < SWEEP; i++) // -128 to 128 by 2^-9; and floats of every exponent, whose last bits vary
    x[i] =
        fine ? (float)(i - SWEEP / 2) * 0x1p-9f : bits_to_float((uint32_t)i * 32768u + ((uint32_t)i * 40503u & 32767u));
}
#define FUNCTION_CASE(NAME, EXPRESSION, SPEC)                            \
  for (int fine = 0; fine < 2; fine++) {                                 \
    name_case("%s over %s", NAME, fine ? "-128 to 128" : "all floats");  \
    float *x = floats(SWEEP), *want = floats(SWEEP), *y = floats(SWEEP); \
    sweep_values(x, fine);                                               \
    V_MAP(y, x, SWEEP, EXPRESSION);                                      \
    say_any(case_name, y, SWEEP);                                        \
    for (int i = 0; i < SWEEP; i++) want[i] = SPEC(x[i]);                \
    must(case_name, "the specification", y, want, SWEEP);                \
    let_go();                                                            \
  }
static void functions(void){
    FUNCTION_CASE("exp", v_exp(a), spec_exp) FUNCTION_CASE("tanh", v_tanh(a), spec_tanh)
        FUNCTION_CASE("sigmoid", v_sigmoid(a), spec_sigmoid) FUNCTION_CASE("silu", v_silu(a), spec_silu)
            FUNCTION_CASE("gelu", v_gelu(a), spec_gelu) FUNCTION_CASE("gelu_tanh", v_gelu_tanh(a), spec_gelu_tanh)
                FUNCTION_CASE("relu", v_relu(a), spec_relu)}

// ---- operations on rows

#define ROWS 5
// Slot 0 in place, slot 1 beside it; out_width values a row. Gives the result, in memory of the case.
static float *row_case(const char *word, step s, int width, int second_width) {
  name_case("%s %d", word, width);
  float *x = random_floats((int64_t)ROWS * width, -6, 3), *y = random_floats((int64_t)ROWS * second_width, -6, 3);
  float *out = floats((int64_t)ROWS * (s.out_width ? s.out_width : width)), *slots[] = {x, y, out};
  s.in[0] = 0, s.in[1] = second_width ? 1 : -1, s.in[2] = -1, s.width = width;
  s.out = s.out_width ? 2 : 0;
  if (!s.out_width) s.out_width = width;
  s.vector = random_floats(4096, -6, 0), s.second = random_floats(4096, -6, 0); // weights; cosines and sines
  go(&s, 1, &(run){.rows = ROWS, .positions = (int64_t[ROWS]){0, 1, 2, 9, 30}, .slots = slots});
  say(case_name, slots[s.out], (int64_t)ROWS * s.out_width);
  return slots[s.out];
}
static void rows_alone(void) {
  static const struct {
    const char *word;
    step s;
  } each[] = {
      {"rms_norm", {.op = RMS_NORM, .f = 1e-6f}},
      {"scale", {.op = SCALE, .f = 0.3f}},
      {"softcap", {.op = SOFTCAP, .f = 1.7f}},
      {"add_bias", {.op = ADD_BIAS}},
      {"norm_heads", {.op = NORM_HEADS, .n = {2}, .f = 1e-5f}},
      {"rope", {.op = ROPE, .n = {2, 24}}},
      {"rope_pairs", {.op = ROPE_PAIRS, .n = {2, 24}}},
      {"softmax", {.op = SOFTMAX}},
      {"sigmoid", {.op = SIGMOID}},
      {"silu", {.op = SILU_OP}},
      {"gelu", {.op = GELU_OP}},
      {"gelu_tanh", {.op = GELU_TANH_OP}},
      {"relu", {.op = RELU_OP}},
  };
  static const int widths[] = {50, 96, 576, 2048};
  for (size_t i = 0; i < sizeof each / sizeof *each; i++)
    for (int w = 0; w < 4; w++) {
      row_case(each[i].word, each[i].s, widths[w], 0);
      let_go();
    }
  for (int w = 0; w < 4; w++) {
    row_case("add", (step){.op = ADD}, widths[w], widths[w]);
    row_case("mul", (step){.op = MUL, .n = {widths[w]}}, widths[w], widths[w]);
    row_case("mul by one number", (step){.op = MUL, .n = {1}}, widths[w], 1);
    row_case("take", (step){.op = TAKE, .n = {2, widths[w] / 2, 3, 20}, .out_width = 40}, widths[w], 0);
    let_go();
  }
  for (int n = 1; n < 130; n += n < 9 ? 7 : 40) { // 1, 8, 15, 55, 95
    name_case("softmax and rms_norm to the specification %d", n);
    float *x = random_floats(n, -3, 3), *y = floats(n), *z = floats(n), *want = floats(n),
          *weight = random_floats(n, -3, 3);
    memcpy(y, x, sizeof(float) * (size_t)n);
    memcpy(want, x, sizeof(float) * (size_t)n);
    softmax(y, n);
    spec_softmax(want, n);
    must(case_name, "the specification", y, want, n);
    rms_norm(z, x, weight, n, 1e-6f);
    spec_rms_norm(want, x, weight, n, 1e-6f);
    must(case_name, "the specification", z, want, n);
    let_go();
  }
  name_case("normalize");
  float *w = random_floats(64, -20, -1);
  for (int i = 0; i < 64; i += 8) w[i] = fabsf(w[i]), normalize(w + i, 1 + i / 8);
  say(case_name, w, 64);
  let_go();
}
static void choice_case(int n, int k, int weighted) {
  name_case("top_k %d of %d%s", k, n, weighted ? " by other weights" : "");
  float *x = floats((int64_t)ROWS * n), *y = random_floats((int64_t)ROWS * n, -3, 0), *out = floats((int64_t)ROWS * k),
        *slots[] = {x, y, out};
  for (int i = 0; i < ROWS * n; i++) x[i] = (float)random_below(n) * 0x1p-4f; // ties
  x[3] = bits_to_float(0x7FC00000u), x[n + 1] = -INFINITY;
  int32_t *ids[] = {0, 0, room(sizeof(int32_t) * (size_t)(ROWS * k))};
  step s = {.op = TOP_K, .in = {0, weighted ? 1 : -1, -1}, .out = 2, .width = n, .out_width = k};
  go(&s, 1, &(run){.rows = ROWS, .slots = slots, .ids = ids});
  float *both = floats((int64_t)2 * ROWS * k);
  for (int i = 0; i < ROWS * k; i++) both[2 * i] = (float)ids[2][i], both[2 * i + 1] = out[i];
  say_any(case_name, both, (int64_t)2 * ROWS * k);
  let_go();
}

// ---- attention

typedef struct {
  const char *word;
  attention t;
  int before[2], rows[2]; // of two sequences: what is cached, and the rows of this run
} attention_setting;
static void *cache_room(int64_t n, int is_half) { return room((is_half ? 2 : 4) * (size_t)n); }
static void attention_case(const attention_setting *setting, int is_half) {
  attention t = setting->t;
  t.is_half = is_half;
  name_case("attention %s%s", is_half ? "f16 " : "", setting->word);
  if (t.sinks) t.sinks = random_floats(t.heads, -2, 3);
  int widths[] = {t.kv_heads * t.width, t.kv_heads * t.value_width}, rows = setting->rows[0] + setting->rows[1];
  cache caches[2];
  const cache *table[] = {caches, caches + 1};
  float *kept[2][2];
  for (int i = 0; i < 2; i++) {
    int all = setting->before[i] + setting->rows[i];
    int64_t *positions = room(sizeof(int64_t) * (size_t)(all + 1));
    int32_t *sequence = room(sizeof(int32_t) * (size_t)(all + 1));
    for (int p = 0; p < all; p++) positions[p] = p, sequence[p] = i;
    for (int part = 0; part < 2; part++) kept[i][part] = random_floats((int64_t)all * widths[part], -4, 1);
    caches[i] = (cache){cache_room((int64_t)t.kv_heads * all * filled(t.width), is_half),
                        cache_room((int64_t)t.kv_heads * all * filled(t.value_width), is_half), all};
    step s = {.op = APPEND, .in = {0, 1, -1}, .out = -1, .n = {t.kv_heads, t.width, t.value_width, is_half}};
    go(&s, 1, &(run){.rows = all, .positions = positions, .sequence = sequence, .caches = table, .slots = kept[i]});
    for (int part = 0; part < 2 && is_half; part++) // what the specification sees of them
      for (int64_t j = 0; j < (int64_t)all * widths[part]; j++) kept[i][part][j] = half(spec_half(kept[i][part][j]));
  }
  float *q = random_floats((int64_t)rows * t.heads * t.width, -2, 2),
        *out = floats((int64_t)rows * t.heads * t.value_width), *one = floats(t.heads * t.value_width);
  int64_t *positions = room(sizeof(int64_t) * (size_t)rows), most = 0;
  int32_t *sequence = room(sizeof(int32_t) * (size_t)rows);
  for (int i = 0, row = 0; i < 2; i++)
    for (int p = 0; p < setting->rows[i]; p++, row++) {
      positions[row] = setting->before[i] + p, sequence[row] = i;
      most = positions[row] + 1 > most ? positions[row] + 1 : most;
    }
  step s = {.op = ATTENTION, .in = {0, -1, -1}, .out = 1, .a = t};
  float *slots[] = {q, out};
  go(&s, 1,
     &(run){.rows = rows,
            .positions = positions,
            .sequence = sequence,
            .caches = table,
            .slots = slots,
            .most_keys = most});
  say(case_name, out, (int64_t)rows * t.heads * t.value_width);
  for (int row = 0; row < rows; row++) {
    float *q_row = q + (ptrdiff_t)row * t.heads * t.width, *out_row = out + (ptrdiff_t)row * t.heads * t.value_width,
          *alone[] = {q_row, one};
    go(&s, 1,
       &(run){.rows = 1,
              .positions = positions + row,
              .sequence = sequence + row,
              .caches = table,
              .slots = alone,
              .most_keys = positions[row] + 1});
    must(case_name, "the row by itself", out_row, one, t.heads * t.value_width);
    for (int h = 0; h < t.heads && row % 3 == 0; h += h + 6 < t.heads ? 5 : 1) {
      int kv = h / (t.heads / t.kv_heads), end = (int)positions[row] + 1,
          start = t.window && end > t.window ? end - t.window : 0;
      float *k = floats((int64_t)end * t.width), *v = floats((int64_t)end * t.value_width);
      for (int p = 0; p < end; p++) {
        memcpy(k + (ptrdiff_t)p * t.width, kept[sequence[row]][0] + (ptrdiff_t)p * widths[0] + kv * t.width,
               sizeof(float) * (size_t)t.width);
        memcpy(v + (ptrdiff_t)p * t.value_width, kept[sequence[row]][1] + (ptrdiff_t)p * widths[1] + kv * t.value_width,
               sizeof(float) * (size_t)t.value_width);
      }
      spec_attention(one, &t, h, q_row + h * t.width, k, v, start, end);
      must(case_name, "the specification", out_row + h * t.value_width, one, t.value_width);
    }
  }
  let_go();
}
// Keys and values of every size, and all that lies between two F16 and beside it
static void keep_half_case(int width) {
  name_case("kept in f16, heads of %d", width);
  enum { BETWEEN = 3 * 0x7C00 };
  int rows = (SWEEP + BETWEEN) / (2 * width), n = 2 * rows * width;
  float *x = floats(SWEEP + BETWEEN);
  sweep_values(x, 0);
  for (int h = 0; h < 0x7C00; h++) // from h to h + 1, which for the last one would be 65536
    for (int i = 0; i < 3; i++) {
      float middle = h == 0x7BFF ? 65520.0f : 0.5f * half((uint16_t)h) + 0.5f * half((uint16_t)(h + 1));
      x[SWEEP + 3 * h + i] =
          bits_to_float((float_to_bits(middle) + (uint32_t)i - (middle > 0)) | (uint32_t)(h & 1) << 31);
    }
  int64_t *positions = room(sizeof(int64_t) * (size_t)rows);
  int32_t *sequence = room(sizeof(int32_t) * (size_t)rows);
  for (int i = 0; i < rows; i++) positions[i] = i, sequence[i] = 0;
  cache c = {cache_room((int64_t)rows * filled(width), 1), cache_room((int64_t)rows * filled(width), 1), rows};
  step s = {.op = APPEND, .in = {0, 1, -1}, .out = -1, .n = {1, width, width, 1}};
  go(&s, 1,
     &(run){.rows = rows,
            .positions = positions,
            .sequence = sequence,
            .caches = (const cache *[]){&c},
            .slots = (float *[]){x, x + rows * width}});
  float *got = floats(2 * (int64_t)rows * filled(width)), *want = floats(2 * (int64_t)rows * filled(width));
  for (int i = 0, at = 0; i < n; i += width) // the bits as they are, but of what is no number
    for (int j = 0; j < filled(width); j++, at++) {
      uint16_t kept = ((const uint16_t *)(i < n / 2 ? c.keys : c.values))[i % (n / 2) / width * filled(width) + j];
      got[at] = (kept & 0x7FFF) > 0x7C00 ? NAN : (float)kept;
      uint16_t right = j < width ? spec_half(x[i + j]) : 0;
      want[at] = (right & 0x7FFF) > 0x7C00 ? NAN : (float)right;
    }
  say_any(case_name, got, 2 * (int64_t)rows * filled(width));
  must(case_name, "the specification", got, want, 2 * (int64_t)rows * filled(width));
  let_go();
}
static void attentions(int is_half) {
  static const float some;
  static const attention_setting each[] = {
      {"prefill", {4, 2, 64, 64, 0, 0.125f, 0, 0, 0}, {0, 0}, {40, 1}},
      {"two sequences over blocks", {4, 2, 64, 64, 0, 0.125f, 0, 0, 0}, {250, 505}, {9, 10}},
      {"decode", {9, 3, 64, 64, 0, 0.125f, 0, 0, 0}, {599, 0}, {1, 0}},
      {"window", {4, 4, 32, 32, 40, 0.2f, 0, 0, 0}, {270, 30}, {9, 20}},
      {"window over blocks and sinks", {8, 2, 64, 64, 300, 0.125f, 0, &some, 0}, {560, 255}, {7, 3}},
      {"sinks", {6, 2, 32, 32, 0, 0.2f, 0, &some, 0}, {0, 20}, {6, 1}},
      {"softcap", {4, 1, 48, 64, 0, 0.2f, 5.0f, 0, 0}, {256, 0}, {6, 5}},
      {"odd widths", {5, 1, 80, 48, 0, 0.11f, 0, 0, 0}, {37, 0}, {4, 7}},
      {"odder widths", {5, 1, 72, 33, 0, 0.11f, 0, 0, 0}, {37, 0}, {4, 7}},
      {"wide heads", {4, 1, 256, 256, 0, 0.0625f, 0, 0, 0}, {300, 0}, {3, 1}},
      {"wide groups", {16, 1, 32, 96, 0, 0.2f, 0, 0, 0}, {100, 3}, {4, 2}},
      {"very wide groups", {70, 1, 32, 16, 20, 0.2f, 0, &some, 0}, {60, 0}, {3, 2}},
  };
  for (size_t i = 0; i < sizeof each / sizeof *each; i++) attention_case(each + i, is_half);
}

#include "driver_experts.h"
#include "driver_i16.h"

int main(int count, char **words) {
  setvbuf(stdout, 0, _IOLBF, BUFSIZ); // if it crashes, the last line tells where
  threads = swarm_pool_new(count > 1 ? atoi(words[1]) : 1);
  if (!threads) return 2;
  fprintf(stderr, "variant %s, %d threads\n", swarm_variant(), swarm_pool_threads(threads));
  // 53 rows of weights are handed out in two pieces
  static const int all[] = {256, 64, 9, 8, 2, 1, 0}, few[] = {9, 2, 1, 0}, over[] = {300, 0};
#define X(T, WEIGHTS, BYTES_)                                                            \
  dequantise_case(T, #T, 2048);                                                          \
  embed_case(T, #T, 512);                                                                \
  product_case(T, #T, T == Q8_0 || T == Q4_K ? 53 : 29, WEIGHTS == 32 ? 576 : 512, all); \
  product_case(T, #T, 29, 2048, few);
  FOR_EACH_TYPE(X)
#undef X
#define X(T)                  \
  dequantise_case(T, #T, 50); \
  embed_case(T, #T, 50);      \
  product_case(T, #T, 29, 50, all);
  X(F32)
  X(F16)
  X(BF16)
#undef X
  every_half(F16, "F16");
  every_half(BF16, "BF16");
  product_case(Q8_0, "Q8_0", 11, 96, over);
  functions();
  rows_alone();
  choice_case(8, 2, 0);
  choice_case(128, 8, 1);
  choice_case(60, 60, 0);
  attentions(0);
  experts(0);
  models(0, 0);
  keep_half_case(512);
  keep_half_case(45);
  attentions(1);
  integers();
  experts(1);
  models(1, 1);
  swarm_pool_free(threads);
  return failures != 0;
}
