// A bound program between two swarm boundaries, run in one call: straight-line steps on slots, barriers where they are
// needed.
//
// What a thread does depends on the kind of a step. Row steps: each thread takes its own rows, so that a chain of them
// needs no barrier. Shared steps hand out pieces of their result by a counter. The binding side says before which steps
// all threads have to meet (`meet`). Nothing here is exported but the functions named swarm_*.
#include "attention.h"
#include "experts.h"
#include "rows.h"

#define EXPORT __attribute__((visibility("default")))

enum part { DENSE, ROUTER, EXPERT_ROWS, COMBINE };
enum op {
  EMBED,
  RMS_NORM,
  COPY,
  ADD,
  MUL,
  SCALE,
  SOFTCAP,
  ADD_BIAS,
  NORM_HEADS,
  ROPE,
  ROPE_PAIRS,
  SOFTMAX,
  SIGMOID,
  SILU_OP,
  GELU_OP,
  GELU_TANH_OP,
  RELU_OP,
  NORMALIZE,
  TAKE,
  TOP_K,
  APPEND,
  QUANTISE,
  LAST,
  MATMUL,
  ATTENTION,
  EXPERTS
};

typedef struct {
  int32_t op, layer, meet, wanted; // meet: a barrier before it; wanted: its rows are those whose logits are wanted
  int32_t in[3], out; // slots; -1 for none. In the i16 class the last input of a product is its x, quantised
  int32_t width;      // of the first input; for TOP_K of the scores
  int32_t out_width;
  int32_t n[5];
  float f;
  int32_t memory, part;         // part: what its time is charged to
  const float *vector, *second; // weights, a bias; cosines and sines
  matrix m;
  attention a;
  const bank *b;
} step;
typedef struct {
  int32_t rows, wanted_count;
  const int32_t *tokens;
  const int64_t *positions;
  const int32_t *wanted;
  const int32_t *sequence;    // of each row: an index of `caches`
  const cache *const *caches; // of each sequence: one a memory
  float *const *slots;
  int32_t *const *ids;         // of each slot that top_k fills
  const int32_t *const *given; // of each layer [rows][k] in place of top_k's own choice; 0 for none
  int64_t most_keys;
  int32_t bad_layer; // result: where experts' rows were not finite, -1 for nowhere
  float *hidden, *hidden_quantised,
      *expert_rows; // room for the pairs of one layer; the second one in the i16 class only
  int32_t *index;   // and for their order
  int64_t *ns;      // nanoseconds by part, where they are wanted; 0 where not
} run;
typedef struct {
  const step *steps;
  int32_t count;
  run *r;
  atomic_int *counters; // two for each step
  call experts;
  atomic_int bad_layer, no_memory;
  int64_t since;
  int32_t x_rows;
} job;

INLINE int next(atomic_int *counter) { return atomic_fetch_add_explicit(counter, 1, memory_order_relaxed); }
INLINE int share(int rows, int thread, int threads) { return (int)(((int64_t)rows * thread + threads - 1) / threads); }
static int position_of(const run *r, const step *s, int row) { return s->wanted ? r->wanted[row] : row; }

static void row_step(const step *s, const run *r, int row) {
  float *x = s->in[0] >= 0 ? r->slots[s->in[0]] + (size_t)row * (size_t)s->width : 0;
  float *out = s->out >= 0 ? r->slots[s->out] + (size_t)row * (size_t)s->out_width : 0;
  const float *y = s->in[1] >= 0 ? r->slots[s->in[1]] : 0;
  int w = s->width;
  switch (s->op) {
  case EMBED: {
    const uint8_t *data = s->m.data + (size_t)r->tokens[row] * (size_t)s->m.row_bytes;
    if (s->m.cols % LANES == 0) {
      fill_of[s->m.type](data, out, s->m.cols);
    } else { // nothing behind the row is ours to fill up
      int whole = s->m.cols / LANES * LANES;
      float rest[LANES];
      fill_of[s->m.type](data, out, whole);
      fill_of[s->m.type](data + (size_t)whole * (size_t)(s->m.row_bytes / s->m.cols), rest, s->m.cols - whole);
      memcpy(out + whole, rest, sizeof(float) * (size_t)(s->m.cols - whole));
    }
    break;
  }
  case RMS_NORM: rms_norm(out, x, s->vector, w, s->f); break;
  case COPY: memcpy(out, x, sizeof(float) * (size_t)w); break;
  case ADD: V_MAP2(out, x, y + (size_t)row * (size_t)w, w, v_add(a, b)); break;
  case MUL:
    if (s->n[0] == 1)
      V_MAP(out, x, w, v_mul(a, v_all(y[row])));
    else
      V_MAP2(out, x, y + (size_t)row * (size_t)w, w, v_mul(a, b));
    break;
  case SCALE: V_MAP(out, x, w, v_mul(a, v_all(s->f))); break;
  case SOFTCAP: V_MAP(out, x, w, v_mul(v_all(s->f), v_tanh(v_div(a, v_all(s->f))))); break;
  case ADD_BIAS: V_MAP2(out, x, s->vector, w, v_add(a, b)); break;
  case NORM_HEADS:
    for (int h = 0, d = w / s->n[0]; h < s->n[0]; h++)
      rms_norm(out + (ptrdiff_t)h * d, x + (ptrdiff_t)h * d, s->vector, d, s->f);
    break;
  case ROPE:
  case ROPE_PAIRS: {
    size_t at = (size_t)r->positions[position_of(r, s, row)] * (size_t)(s->n[1] / 2);
    rope(x, s->n[0], w / s->n[0], s->n[1], s->vector + at, s->second + at, s->op == ROPE_PAIRS);
    break;
  }
  case SOFTMAX: softmax(x, w); break;
  case SIGMOID: V_MAP(out, x, w, v_sigmoid(a)); break;
  case SILU_OP: V_MAP(out, x, w, v_silu(a)); break;
  case GELU_OP: V_MAP(out, x, w, v_gelu(a)); break;
  case GELU_TANH_OP: V_MAP(out, x, w, v_gelu_tanh(a)); break;
  case RELU_OP: V_MAP(out, x, w, v_relu(a)); break;
  case NORMALIZE: normalize(x, w); break;
  case TAKE: // n: heads, values of a head, offset in a head, values taken of a head
    for (int h = 0; h < s->n[0]; h++)
      memcpy(out + (ptrdiff_t)h * s->n[3], x + (ptrdiff_t)h * s->n[1] + s->n[2], sizeof(float) * (size_t)s->n[3]);
    break;
  case TOP_K: {
    int k = s->out_width;
    int32_t *ids = r->ids[s->out] + (size_t)row * (size_t)k;
    if (r->given && r->given[s->layer])
      memcpy(ids, r->given[s->layer] + (size_t)row * (size_t)k, sizeof(int32_t) * (size_t)k);
    else
      top_k(x, w, k, ids);
    const float *weights = y ? y + (size_t)row * (size_t)w : x;
    for (int i = 0; i < k; i++) out[i] = weights[ids[i]];
    break;
  }
  case QUANTISE: {
    quantised q = quantised_at(out, w);
    quantise(x, 0, w, w, &q);
    break;
  }
  case APPEND: { // in: keys, values; n: kv heads, key width, value width, whether they are kept in F16
    const cache *c = r->caches[r->sequence[row]] + s->memory;
    for (int part = 0, heads = s->n[0]; part < 2; part++) {
      int d = s->n[1 + part];
      const float *from = r->slots[s->in[part]] + (size_t)row * (size_t)(heads * d);
      for (int h = 0; h < heads; h++)
        keep_row(part ? c->values : c->keys, ((ptrdiff_t)h * c->capacity + r->positions[row]) * filled(d),
                 from + (ptrdiff_t)h * d, d, s->n[3]);
    }
    break;
  }
  }
}

// ---- shared steps

static void matmul_step(job *j, pool *p, int thread, const step *s, atomic_int *counter) {
  const run *r = j->r;
  int rows = s->wanted ? r->wanted_count : r->rows, k = s->m.cols, chunk;
  if (rows == 1) {
    chunk = 32768 / s->m.row_bytes;
    int most = s->m.rows / (8 * p->threads);
    chunk = chunk < most ? chunk : most;
    chunk = chunk < 8 ? 8 : chunk;
  } else {
    chunk = 2 * TILE_ROWS;
  }
  size_t copies = rows > 1 && k % LANES ? (size_t)MOST_COLUMNS * (size_t)filled(k) : 0;
  float *tile = rows > 1 ? scratch(p, thread, tile_floats(k) + copies) : 0;
  if (rows > 1 && !tile) {
    atomic_store(&j->no_memory, 1);
    return;
  }
  const float *x[MOST_COLUMNS];
  float *out[MOST_COLUMNS];
  quantised q[MOST_COLUMNS];
  for (int item; (item = next(counter)) * chunk < s->m.rows;) {
    int from = item * chunk, to = from + chunk < s->m.rows ? from + chunk : s->m.rows;
    for (int first = 0; first < rows; first += MOST_COLUMNS) {
      int n = rows - first < MOST_COLUMNS ? rows - first : MOST_COLUMNS;
      for (int i = 0; i < n; i++) {
        x[i] = r->slots[s->in[0]] + (size_t)(first + i) * (size_t)k;
        out[i] = r->slots[s->out] + (size_t)(first + i) * (size_t)s->m.rows;
        if (copies) {
          float *copy = tile + tile_floats(k) + (size_t)i * (size_t)filled(k);
          memset(copy, 0, sizeof(float) * (size_t)filled(k));
          x[i] = memcpy(copy, x[i], sizeof(float) * (size_t)k);
        }
      }
      if (s->in[1] >= 0)
        for (int i = 0; i < n; i++)
          q[i] = quantised_at(r->slots[s->in[1]] + (size_t)(first + i) * quantised_floats(k), k);
      any_products(&s->m, from, to, x, s->in[1] >= 0 ? q : 0, n, out, tile);
    }
  }
}
static void attention_step(job *j, pool *p, int thread, const step *s, atomic_int *counter) {
  const run *r = j->r;
  const attention *t = &s->a;
  int at_once = r->rows > 1 ? rows_at_once(t) : 1, groups = chunks(r->rows, at_once);
  float *space = scratch(p, thread, attention_scratch(t, r->most_keys, at_once));
  if (!space) {
    atomic_store(&j->no_memory, 1);
    return;
  }
  for (int item; (item = next(counter)) < groups * t->kv_heads;) {
    int kv_head = item % t->kv_heads, first = item / t->kv_heads * at_once;
    int end = first + at_once < r->rows ? first + at_once : r->rows;
    for (int row = first, some; row < end; row += some) { // rows that follow one another in one sequence
      for (some = 1; row + some < end && r->sequence[row + some] == r->sequence[row] &&
                     r->positions[row + some] == r->positions[row] + some;)
        some++;
      attend(t, r->caches[r->sequence[row]] + s->memory, kv_head, row, some, r->positions[row], r->slots[s->in[0]],
             r->slots[s->out], space);
    }
  }
}
static void prepare_experts(job *j, const step *s) {
  const run *r = j->r;
  call *c = &j->experts;
  int rows = s->wanted ? r->wanted_count : r->rows, k = s->n[0], pairs = rows * k;
  int32_t *row_of = r->index;
  *c = (call){.bank = s->b,
              .x = r->slots[s->in[0]],
              .x_stride = s->width,
              .pair_count = pairs,
              .row_of = row_of,
              .expert_of = r->ids[s->in[1]],
              .step = 1,
              .order = row_of + pairs,
              .starts = row_of + 2 * pairs,
              .members = row_of + 3 * pairs + 1,
              .hidden = r->hidden,
              .rows = r->expert_rows,
              .x_quantised = s->in[2] >= 0 ? r->slots[s->in[2]] : 0,
              .hidden_quantised = s->in[2] >= 0 ? r->hidden_quantised : 0};
  for (int i = 0; i < pairs; i++) row_of[i] = i / k;
  group(c);
}
static void run_items(job *j, pool *p, int thread, const call *c, void item(const call *, int, float *), int rows,
                      atomic_int *counter) {
  float *space = scratch(p, thread, expert_scratch(c->bank));
  if (!space) {
    atomic_store(&j->no_memory, 1);
    return;
  }
  int items = c->group_count * chunks(rows, c->chunk);
  for (int i; (i = next(counter)) < items;) item(c, i, space);
}
// Charge the time since *since to a part, and begin anew
static void charge(const run *r, int part, int64_t *since) {
  if (!r->ns) return;
  int64_t now = now_ns();
  r->ns[part] += now - *since;
  *since = now;
}
static void experts_step(job *j, pool *p, int thread, const step *s, atomic_int *counters) {
  const run *r = j->r;
  call *c = &j->experts;
  if (thread == 0) prepare_experts(j, s);
  barrier(p);
  run_items(j, p, thread, c, hidden_item, s->b->hidden, counters);
  barrier(p);
  run_items(j, p, thread, c, output_item, s->b->outputs, counters + 1);
  barrier(p);
  if (thread == 0) charge(r, EXPERT_ROWS, &j->since);
  int rows = s->wanted ? r->wanted_count : r->rows, k = s->n[0], d = s->b->outputs, from = 0, to = d;
  if (rows == 1)
    from = share(d / LANES, thread, p->threads) * LANES,
    to = thread + 1 == p->threads ? d : share(d / LANES, thread + 1, p->threads) * LANES;
  for (int row = rows == 1 ? 0 : share(rows, thread, p->threads);
       row < (rows == 1 ? 1 : share(rows, thread + 1, p->threads)); row++) {
    float *out = r->slots[s->out] + (size_t)row * (size_t)d;
    merge(out + from, c->rows + (size_t)row * (size_t)k * (size_t)d + from, d,
          r->slots[s->in[1]] + (size_t)row * (size_t)k, k, to - from);
    if (!is_finite(out + from, to - from)) {
      int none = -1;
      atomic_compare_exchange_strong(&j->bad_layer, &none, s->layer);
    }
  }
}
static void run_steps(pool *p, int thread, void *what) {
  job *j = what;
  const run *r = j->r;
  for (int i = 0; i < j->count; i++) {
    const step *s = j->steps + i;
    if (s->meet) barrier(p);
    switch (s->op) {
    case LAST:
      if (thread == 0)
        for (int w = 0; w < r->wanted_count; w++)
          memcpy(r->slots[s->out] + (size_t)w * (size_t)s->width,
                 r->slots[s->in[0]] + (size_t)r->wanted[w] * (size_t)s->width, sizeof(float) * (size_t)s->width);
      break;
    case MATMUL: matmul_step(j, p, thread, s, j->counters + 2 * i); break;
    case ATTENTION: attention_step(j, p, thread, s, j->counters + 2 * i); break;
    case EXPERTS: experts_step(j, p, thread, s, j->counters + 2 * i); break;
    default: {
      int rows = s->wanted ? r->wanted_count : r->rows;
      for (int row = share(rows, thread, p->threads), end = share(rows, thread + 1, p->threads); row < end; row++)
        row_step(s, r, row);
    }
    }
    if (thread == 0) charge(r, s->op == EXPERTS ? COMBINE : s->part, &j->since);
  }
}

// ---- what Python calls

// Sizes of the structures, so that the caller can see that it has the same idea of them.
EXPORT void swarm_sizes(int32_t *sizes) {
  int32_t all[] = {sizeof(step), sizeof(run),   sizeof(matrix),   sizeof(expert),
                   sizeof(bank), sizeof(cache), sizeof(attention)};
  memcpy(sizes, all, sizeof all);
}
EXPORT const char *swarm_variant(void) { return VARIANT; }
EXPORT pool *swarm_pool_new(int32_t threads) {
  pool *p = aligned_alloc(128, (sizeof(pool) + 127) / 128 * 128);
  if (!p) return 0;
  memset(p, 0, sizeof *p);
  pthread_mutex_init(&p->lock, 0);
  pthread_cond_init(&p->news, 0);
  p->threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
  for (int i = 1; i < p->threads; i++) {
    place *here = malloc(sizeof *here);
    if (here) *here = (place){p, i};
    if (!here || pthread_create(&p->thread[i], 0, pool_thread, here)) {
      free(here);
      p->threads = i; // fewer will do; nobody has run yet
      break;
    }
  }
  return p;
}
EXPORT int32_t swarm_pool_threads(const pool *p) { return p->threads; }
EXPORT void swarm_pool_free(pool *p) {
  p->stop = 1;
  if (p->threads > 1) change(p, &p->run);
  for (int i = 1; i < p->threads; i++) pthread_join(p->thread[i], 0);
  for (int i = 0; i < p->threads; i++) free(p->scratch[i]);
  free(p);
}
// 0, or 1 when there is no memory. r->bad_layer tells of experts whose rows were not finite.
EXPORT int32_t swarm_run(pool *p, const step *steps, int32_t count, run *r) {
  job j = {.steps = steps, .count = count, .r = r};
  j.counters = calloc((size_t)count * 2 + 1, sizeof(atomic_int));
  if (!j.counters) return 1;
  atomic_store(&j.bad_layer, -1);
  j.since = r->ns ? now_ns() : 0;
  pool_run(p, run_steps, &j);
  free(j.counters);
  r->bad_layer = atomic_load(&j.bad_layer);
  return atomic_load(&j.no_memory);
}
static void run_call(pool *p, int thread, void *what) {
  job *j = what;
  call *c = &j->experts;
  if (c->x_quantised) {
    int k = c->bank->inputs;
    for (int row = share(j->x_rows, thread, p->threads), end = share(j->x_rows, thread + 1, p->threads); row < end;
         row++) {
      quantised q = quantised_at(c->x_quantised + (size_t)row * quantised_floats(k), k);
      quantise(c->x + (size_t)row * (size_t)k, 0, k, k, &q);
    }
    barrier(p);
  }
  run_items(j, p, thread, &j->experts, hidden_item, j->experts.bank->hidden, j->counters);
  barrier(p);
  run_items(j, p, thread, &j->experts, output_item, j->experts.bank->outputs, j->counters + 1);
}
static float *lines(size_t floats) { return aligned_alloc(128, (sizeof(float) * floats + 127) / 128 * 128 + 128); }
// Unweighted rows out[pairs][outputs] of pairs (row of x[rows][inputs], expert). 0, or 1 when there is no memory.
EXPORT int32_t swarm_expert_rows(pool *p, const bank *b, const float *x, int32_t rows, const int32_t *pairs,
                                 int32_t count, float *out, int32_t i16) {
  atomic_int counters[2] = {0, 0};
  int32_t *index = malloc(sizeof(int32_t) * ((size_t)count * 3 + 1 + (size_t)b->count));
  float *hidden = lines((size_t)count * (size_t)hidden_stride(b));
  float *x_quantised = i16 ? lines((size_t)rows * quantised_floats(b->inputs)) : 0;
  float *hidden_quantised = i16 ? lines((size_t)count * quantised_floats(b->hidden)) : 0;
  int failed = !index || !hidden || (i16 && (!x_quantised || !hidden_quantised));
  job j = {.counters = counters, .x_rows = rows};
  if (!failed) {
    j.experts = (call){.bank = b,
                       .x = x,
                       .x_stride = b->inputs,
                       .pair_count = count,
                       .row_of = pairs,
                       .expert_of = pairs + 1,
                       .step = 2,
                       .order = index,
                       .starts = index + count,
                       .members = index + 2 * count + 1,
                       .hidden = hidden,
                       .rows = out,
                       .x_quantised = x_quantised,
                       .hidden_quantised = hidden_quantised};
    group(&j.experts);
    pool_run(p, run_call, &j);
  }
  free(index);
  free(hidden);
  free(x_quantised);
  free(hidden_quantised);
  return failed || atomic_load(&j.no_memory);
}
// Floats that a row of k activations takes when it is quantised
EXPORT int32_t swarm_quantised_floats(int32_t k) { return (int32_t)quantised_floats(k); }
// Rows of a matrix as F32: out[rows][filled cols]
EXPORT void swarm_dequantise(const matrix *m, float *out) {
  for (int r = 0; r < m->rows; r++)
    fill_of[m->type](m->data + (size_t)r * (size_t)m->row_bytes, out + (size_t)r * (size_t)filled(m->cols), m->cols);
}
