// Experts with their combination, and a small model from end to end.
#pragma once

typedef struct {
  const char *word;
  int gate, down, inputs, hidden, outputs, activation, biased;
} expert_setting;
static bank random_bank(const expert_setting *s, int count) {
  expert *each = room(sizeof(expert) * (size_t)count);
  for (int i = 0; i < count; i++) {
    each[i] = (expert){.gate = random_matrix(s->gate, s->hidden, s->inputs),
                       .up = random_matrix(s->gate, s->hidden, s->inputs),
                       .down = random_matrix(s->down, s->outputs, s->hidden)};
    if (s->biased)
      each[i].gate_bias = random_floats(s->hidden, -3, 0), each[i].up_bias = random_floats(s->hidden, -3, 0),
      each[i].down_bias = random_floats(s->outputs, -3, 0);
  }
  return (bank){each, count, s->activation, s->inputs, s->hidden, s->outputs};
}
#define EXPERT_COUNT 6
static void expert_case(const expert_setting *s, int is_i16) {
  name_case("experts %s%s", is_i16 ? "i16 " : "", s->word);
  static const int widths[] = {256, 64, 9, 8, 2, 1};
  bank b = random_bank(s, EXPERT_COUNT);
  float *x = random_floats((int64_t)256 * s->inputs, is_i16 ? -2 : -6, 1), *first = 0, *one = floats(s->outputs),
        *in_f32 = floats(s->outputs);
  float *weights[EXPERT_COUNT][3];
  for (int e = 0; e < EXPERT_COUNT; e++)
    for (int i = 0; i < 3; i++)
      weights[e][i] = dequantised(i == 0 ? &b.experts[e].gate : i == 1 ? &b.experts[e].up : &b.experts[e].down);
  int32_t *pairs = room(sizeof(int32_t) * 2 * 512);
  for (int i = 0; i < 512; i++) // two of each row; the first one is liked most
    pairs[2 * i] = i / 2, pairs[2 * i + 1] = i % 2             ? 1 + random_below(EXPERT_COUNT - 1)
                                             : random_below(4) ? 0
                                                               : 5 - random_below(2);
  for (int w = is_i16; w < 6; w++) { // in i16 the widest would take an emulated CPU seconds
    int n = 2 * widths[w];
    char name[160];
    snprintf(name, sizeof name, "%s x %d", case_name, widths[w]);
    float *in = floats((int64_t)widths[w] * s->inputs), *out = floats((int64_t)n * s->outputs);
    memcpy(in, x, sizeof(float) * (size_t)widths[w] * (size_t)s->inputs);
    if (swarm_expert_rows(threads, &b, in, widths[w], pairs, n, out, is_i16)) failures++;
    say(name, out, (int64_t)n * s->outputs);
    if (first) {
      must(name, "the widest call", out, first, (int64_t)n * s->outputs);
      continue;
    }
    first = out; // the widest comes first, and is held to the specification
    for (int i = 0; i < n; i += n > 16 ? 61 : 3) {
      int e = pairs[2 * i + 1];
      const float *row = in + (ptrdiff_t)pairs[2 * i] * s->inputs;
      spec_expert(one, &b, b.experts + e, weights[e], row, is_i16);
      must(name, "the specification", out + (ptrdiff_t)i * s->outputs, one, s->outputs);
      if (is_i16) spec_expert(in_f32, &b, b.experts + e, weights[e], row, 0), about(one, in_f32, s->outputs);
    }
  }
  must_be_near(case_name, 2 * I16_BAR); // three products, two of which are multiplied
  let_go();
}
static void experts(int is_i16) {
  static const expert_setting each[] = {
      {"Q4_K Q6_K", Q4_K, Q6_K, 256, 256, 80, SILU, 0},
      {"Q8_0 gelu_tanh", Q8_0, Q8_0, 64, 96, 70, GELU_TANH, 0},
      {"Q4_1 many hidden", Q4_1, IQ4_NL, 32, 544, 40, SILU, 0},
      {"MXFP4 biased", MXFP4, MXFP4, 64, 96, 50, SILU, 1},
      {"F32 relu biased", F32, F32, 40, 36, 50, RELU, 1},
      {"BF16 F16 gelu", BF16, F16, 72, 40, 33, GELU, 0},
      {"Q5_1 F16", Q5_1, F16, 96, 80, 40, SILU, 0},
      {"BF16 Q4_0 biased", BF16, Q4_0, 40, 64, 50, RELU, 1},
  };
  for (size_t i = 0; i < sizeof each / sizeof *each - (is_i16 ? 0 : 2); i++)
    expert_case(each + i, is_i16); // the last two have both classes
}

// ---- a model: two blocks, of which the second has a window; tokens in, logits of wanted rows out

enum {
  D = 96,
  HEADS = 4,
  KV_HEADS = 2,
  WIDTH = 32,
  Q_WIDTH = HEADS * WIDTH,
  KV_WIDTH = KV_HEADS * WIDTH,
  VOCABULARY = 90,
  USED = 2,
  MODEL_ROWS = 20,
  CACHED = 32
};
enum slot { X_, H, QG, Q, GATE, K, V_, A, O, SCORES, CHOSEN, E, SHARE, LAST_X, LAST_H, LOGITS, QUANTISED, SLOTS };
static step model_steps[96];
static int step_count, model_is_i16, model_is_half;
static step *push(int op, int in, int second, int out, int width, int out_width) {
  step *s = model_steps + step_count++;
  *s = (step){.op = op, .meet = 1, .in = {in, second, -1}, .out = out, .width = width, .out_width = out_width};
  return s;
}
static int push_quantised(int in, int cols) { // the slot with its quantised rows; -1 in the F32 class
  if (!model_is_i16) return -1;
  push(QUANTISE, in, -1, QUANTISED, cols, (int)quantised_floats(cols));
  return QUANTISED;
}
static void push_matmul(int type, int in, int out, int rows, int cols) {
  int second = is_integer_type(type) ? push_quantised(in, cols) : -1;
  push(MATMUL, in, second, out, cols, rows)->m = random_matrix(type, rows, cols);
}
static void push_norm(int in, int out) {
  step *s = push(RMS_NORM, in, -1, out, D, D);
  s->f = 1e-6f, s->vector = random_floats(D, -1, 1);
}
static void push_rope(int slot, int heads, int width, const float *cosines, const float *sines) {
  step *s = push(ROPE, slot, -1, slot, width, width);
  s->n[0] = heads, s->n[1] = 24, s->vector = cosines, s->second = sines;
}
static void push_block(int layer, const float *cosines, const float *sines, bank *b) {
  static const expert_setting shapes[] = {{"", Q4_1, MXFP4, D, 64, D, SILU, 0},
                                          {"", IQ4_NL, Q5_1, D, 64, D, GELU_TANH, 1}};
  push_norm(X_, H);
  push_matmul(layer ? Q4_0 : Q8_0, H, QG, 2 * Q_WIDTH, D);
  for (int part = 0; part < 2; part++) {
    step *s = push(TAKE, QG, -1, part ? GATE : Q, 2 * Q_WIDTH, Q_WIDTH);
    s->n[0] = HEADS, s->n[1] = 2 * WIDTH, s->n[2] = part * WIDTH, s->n[3] = WIDTH;
  }
  push_matmul(Q5_0, H, K, KV_WIDTH, D);
  push_matmul(F16, H, V_, KV_WIDTH, D);
  push(ADD_BIAS, V_, -1, V_, KV_WIDTH, KV_WIDTH)->vector = random_floats(KV_WIDTH, -3, 0);
  step *s = push(NORM_HEADS, Q, -1, Q, Q_WIDTH, Q_WIDTH);
  s->n[0] = HEADS, s->f = 1e-6f, s->vector = random_floats(WIDTH, -1, 1);
  push_rope(Q, HEADS, Q_WIDTH, cosines, sines);
  push_rope(K, KV_HEADS, KV_WIDTH, cosines, sines);
  s = push(APPEND, K, V_, -1, 0, 0);
  s->n[0] = KV_HEADS, s->n[1] = WIDTH, s->n[2] = WIDTH, s->n[3] = model_is_half, s->memory = layer;
  s = push(ATTENTION, Q, -1, A, 0, 0);
  s->a = (attention){HEADS,
                     KV_HEADS,
                     WIDTH,
                     WIDTH,
                     layer ? 6 : 0,
                     0.2f,
                     layer ? 0 : 20.0f,
                     layer ? random_floats(HEADS, -2, 1) : 0,
                     model_is_half},
  s->memory = layer;
  push(SIGMOID, GATE, -1, GATE, Q_WIDTH, Q_WIDTH);
  push(MUL, A, GATE, A, Q_WIDTH, Q_WIDTH)->n[0] = Q_WIDTH;
  push_matmul(Q5_1, A, O, D, Q_WIDTH);
  push(ADD, X_, O, X_, D, D);
  push_norm(X_, H);
  push_matmul(F32, H, SCORES, EXPERT_COUNT, D);
  push(SOFTMAX, SCORES, -1, SCORES, EXPERT_COUNT, EXPERT_COUNT);
  push(TOP_K, SCORES, -1, CHOSEN, EXPERT_COUNT, USED)->layer = layer;
  push(NORMALIZE, CHOSEN, -1, CHOSEN, USED, USED);
  *b = random_bank(shapes + layer, EXPERT_COUNT);
  int quantised_h = push_quantised(H, D);
  s = push(EXPERTS, H, CHOSEN, E, D, D);
  s->in[2] = quantised_h, s->n[0] = USED, s->b = b, s->layer = layer;
  push_matmul(BF16, H, SHARE, 1, D);
  push(MUL, E, SHARE, E, D, D)->n[0] = 1;
  push(ADD, X_, E, X_, D, D);
}
// Logits of the last `wanted` of rows `from` to `to`
static void run_model(const int32_t *tokens, const cache *caches, int from, int to, int wanted, float *logits) {
  const int widths[SLOTS] = {D,
                             D,
                             2 * Q_WIDTH,
                             Q_WIDTH,
                             Q_WIDTH,
                             KV_WIDTH,
                             KV_WIDTH,
                             Q_WIDTH,
                             D,
                             EXPERT_COUNT,
                             USED,
                             D,
                             1,
                             D,
                             D,
                             VOCABULARY,
                             (int)quantised_floats(Q_WIDTH)};
  float *slots[SLOTS];
  int32_t *ids[SLOTS] = {0}, n = to - from, sequence[MODEL_ROWS] = {0}, rows[MODEL_ROWS];
  int64_t positions[MODEL_ROWS];
  for (int i = 0; i < SLOTS; i++) slots[i] = floats((int64_t)n * widths[i]);
  ids[CHOSEN] = room(sizeof(int32_t) * (size_t)(n * USED));
  for (int i = 0; i < n; i++) positions[i] = from + i;
  for (int i = 0; i < wanted; i++) rows[i] = n - wanted + i;
  run r = {.rows = n,
           .wanted_count = wanted,
           .tokens = tokens + from,
           .positions = positions,
           .wanted = rows,
           .sequence = sequence,
           .caches = &caches,
           .slots = slots,
           .ids = ids,
           .most_keys = to,
           .hidden = floats((int64_t)n * USED * 64),
           .hidden_quantised = floats((int64_t)n * USED * (int64_t)quantised_floats(64)),
           .expert_rows = floats((int64_t)n * USED * D),
           .index = room(sizeof(int32_t) * (size_t)(4 * n * USED + 1 + EXPERT_COUNT))};
  go(model_steps, step_count, &r);
  memcpy(logits, slots[LOGITS], sizeof(float) * (size_t)(wanted * VOCABULARY));
}
static void models(int is_i16, int is_half) {
  name_case("model%s%s", is_i16 ? " i16" : "", is_half ? " f16 cache" : "");
  step_count = 0, model_is_i16 = is_i16, model_is_half = is_half;
  float *cosines = random_floats(12 * CACHED, -6, 0), *sines = random_floats(12 * CACHED, -6, 0);
  bank banks[2];
  cache caches[2];
  for (int i = 0; i < 2; i++)
    caches[i] =
        (cache){cache_room(KV_HEADS * CACHED * WIDTH, is_half), cache_room(KV_HEADS * CACHED * WIDTH, is_half), CACHED};
  push(EMBED, -1, -1, X_, 0, D)->m = random_matrix(Q8_0, VOCABULARY, D);
  push(SCALE, X_, -1, X_, D, D)->f = 3.1f;
  for (int i = 0; i < 2; i++) push_block(i, cosines, sines, banks + i);
  push(LAST, X_, -1, LAST_X, D, D);
  int from = step_count;
  push_norm(LAST_X, LAST_H);
  push_matmul(Q4_1, LAST_H, LOGITS, VOCABULARY, D);
  step *s = push(SOFTCAP, LOGITS, -1, LOGITS, VOCABULARY, VOCABULARY);
  s->f = 30.0f;
  for (int i = from; i < step_count; i++) model_steps[i].wanted = 1;
  int32_t tokens[MODEL_ROWS];
  for (int i = 0; i < MODEL_ROWS; i++) tokens[i] = random_below(VOCABULARY);
  float *logits = floats(MODEL_ROWS * VOCABULARY), *again = floats(MODEL_ROWS * VOCABULARY);
  run_model(tokens, caches, 0, 17, 9, logits);
  for (int i = 17; i < MODEL_ROWS; i++) run_model(tokens, caches, i, i + 1, 1, logits + (i - 8) * VOCABULARY);
  char name[160];
  snprintf(name, sizeof name, "%s: nine rows of the prompt", case_name);
  say(name, logits, 9 * VOCABULARY);
  snprintf(name, sizeof name, "%s: three tokens more", case_name);
  say(name, logits + 9 * VOCABULARY, 3 * VOCABULARY);
  for (int i = 0; i < MODEL_ROWS; i++) run_model(tokens, caches, i, i + 1, 1, again + i * VOCABULARY);
  must(case_name, "one token at a time", logits, again + 8 * VOCABULARY, 12 * VOCABULARY);
  let_go();
}
