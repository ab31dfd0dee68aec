// Expert feed-forwards, several experts and rows in one go: down (activation(gate x) * (up x)), one row a pair.
#pragma once
#include "functions.h"
#include "i16.h"
#include "pool.h"

enum activation { SILU, GELU, GELU_TANH, RELU };

typedef struct {
  matrix gate, up, down; // data 0 where the expert is not held
  const float *gate_bias, *up_bias, *down_bias;
} expert;
typedef struct {
  const expert *experts;
  int32_t count, activation, inputs, hidden, outputs;
} bank;

// A call in the making. Pairs are grouped by expert; hidden and rows have a row for each pair, in the pairs' own order.
typedef struct {
  const bank *bank;
  const float *x;
  int32_t x_stride, pair_count, group_count, chunk;
  const int32_t *row_of, *expert_of; // of each pair, `step` apart
  int32_t step;
  int32_t *order, *starts, *members;     // pairs by expert; where a group starts in `order`; its expert
  float *x_quantised, *hidden_quantised; // of each row of x and of each pair in the i16 class; else 0
  float *hidden;                         // [pairs][hidden_stride]
  float *rows;                           // [pairs][outputs]
} call;

INLINE int hidden_stride(const bank *b) { return filled(b->hidden); }

static void activate(int word, float *gate, const float *up, float *out, int n) {
  switch (word) {
  case SILU: V_MAP2(out, gate, up, n, v_mul(v_silu(a), b)); break;
  case GELU: V_MAP2(out, gate, up, n, v_mul(v_gelu(a), b)); break;
  case GELU_TANH: V_MAP2(out, gate, up, n, v_mul(v_gelu_tanh(a), b)); break;
  case RELU: V_MAP2(out, gate, up, n, v_mul(v_relu(a), b)); break;
  }
}
static void group(call *c) { // counting sort: order, starts and members have room for pairs, pairs + 1 and pairs
  const bank *b = c->bank;
  int *seen = c->members + c->pair_count; // count entries
  memset(seen, 0, sizeof(int) * (size_t)b->count);
  for (int i = 0; i < c->pair_count; i++) seen[c->expert_of[i * c->step]]++;
  c->group_count = 0;
  int at = 0, most = 0;
  for (int e = 0; e < b->count; e++) {
    if (!seen[e]) continue;
    if (seen[e] > most) most = seen[e];
    c->starts[c->group_count] = at;
    c->members[c->group_count++] = e;
    at += seen[e];
    seen[e] = at - seen[e];
  }
  c->starts[c->group_count] = at;
  for (int i = 0; i < c->pair_count; i++) c->order[seen[c->expert_of[i * c->step]]++] = i;
  c->chunk = most == 1 ? (b->hidden > 512 ? 64 : 32) : 4 * TILE_ROWS;
}
INLINE int chunks(int rows, int chunk) { return (rows + chunk - 1) / chunk; }
static size_t expert_scratch(const bank *b) {
  int widest = b->inputs > b->hidden ? b->inputs : b->hidden;
  return tile_floats(widest) + (size_t)(4 * TILE_ROWS) * MOST_COLUMNS +
         (size_t)MOST_COLUMNS * (size_t)filled(b->inputs);
}
static void add_bias(float *x, const float *bias, int n) {
  if (bias) V_MAP2(x, x, bias, n, v_add(a, b));
}
// Rows of activations of some pairs; copied and filled up where a row does not fill its lanes
static void inputs_of(const call *c, const int32_t *pairs, int n, const float **x, float *copies) {
  int k = c->bank->inputs;
  for (int i = 0; i < n; i++) {
    x[i] = c->x + (size_t)c->row_of[pairs[i] * c->step] * (size_t)c->x_stride;
    if (n > 1 && k % LANES) {
      float *copy = copies + (size_t)i * (size_t)filled(k);
      memset(copy, 0, sizeof(float) * (size_t)filled(k));
      x[i] = memcpy(copy, x[i], sizeof(float) * (size_t)k);
    }
  }
}
static const quantised *quantised_rows(float *base, const int32_t *at, int n, int k, quantised *rows) {
  if (!base) return 0;
  for (int i = 0; i < n; i++) rows[i] = quantised_at(base + (size_t)at[i] * quantised_floats(k), k);
  return rows;
}
static void hidden_item(const call *c, int item, float *space) {
  const bank *b = c->bank;
  int per = chunks(b->hidden, c->chunk), g = item / per, from = item % per * c->chunk;
  int to = from + c->chunk < b->hidden ? from + c->chunk : b->hidden;
  const expert *e = b->experts + c->members[g];
  const float *x[MOST_COLUMNS];
  float *gate[MOST_COLUMNS], *up[MOST_COLUMNS], *gates = space, *tile = gates + 4 * TILE_ROWS * MOST_COLUMNS;
  quantised rows[MOST_COLUMNS];
  int32_t at[MOST_COLUMNS];
  for (int first = c->starts[g]; first < c->starts[g + 1]; first += MOST_COLUMNS) {
    int n = c->starts[g + 1] - first < MOST_COLUMNS ? c->starts[g + 1] - first : MOST_COLUMNS;
    const int32_t *pairs = c->order + first;
    inputs_of(c, pairs, n, x, tile + tile_floats(b->inputs > b->hidden ? b->inputs : b->hidden));
    for (int i = 0; i < n; i++) at[i] = c->row_of[pairs[i] * c->step];
    const quantised *q = quantised_rows(c->x_quantised, at, n, b->inputs, rows);
    for (int i = 0; i < n; i++) {
      gate[i] = gates + (ptrdiff_t)i * c->chunk - from;
      up[i] = c->hidden + (size_t)pairs[i] * (size_t)hidden_stride(b);
    }
    any_products(&e->gate, from, to, x, q, n, gate, tile);
    any_products(&e->up, from, to, x, q, n, up, tile);
    for (int i = 0; i < n; i++) {
      if (e->gate_bias) add_bias(gate[i] + from, e->gate_bias + from, to - from);
      if (e->up_bias) add_bias(up[i] + from, e->up_bias + from, to - from);
      activate(b->activation, gate[i] + from, up[i] + from, up[i] + from, to - from);
      if (to == b->hidden) memset(up[i] + to, 0, sizeof(float) * (size_t)(hidden_stride(b) - to));
      if (c->hidden_quantised && is_integer_type(e->down.type)) { // a chunk is whole blocks of 32
        quantised h = quantised_at(c->hidden_quantised + (size_t)pairs[i] * quantised_floats(b->hidden), b->hidden);
        quantise(up[i], from, to, b->hidden, &h);
      }
    }
  }
}
static void output_item(const call *c, int item, float *space) {
  const bank *b = c->bank;
  int per = chunks(b->outputs, c->chunk), g = item / per, from = item % per * c->chunk;
  int to = from + c->chunk < b->outputs ? from + c->chunk : b->outputs;
  const expert *e = b->experts + c->members[g];
  const float *x[MOST_COLUMNS];
  float *out[MOST_COLUMNS];
  quantised rows[MOST_COLUMNS];
  for (int first = c->starts[g]; first < c->starts[g + 1]; first += MOST_COLUMNS) {
    int n = c->starts[g + 1] - first < MOST_COLUMNS ? c->starts[g + 1] - first : MOST_COLUMNS;
    for (int i = 0; i < n; i++) {
      int pair = c->order[first + i];
      x[i] = c->hidden + (size_t)pair * (size_t)hidden_stride(b);
      out[i] = c->rows + (size_t)pair * (size_t)b->outputs;
    }
    any_products(&e->down, from, to, x, quantised_rows(c->hidden_quantised, c->order + first, n, b->hidden, rows), n,
                 out, space);
    if (e->down_bias)
      for (int i = 0; i < n; i++) add_bias(out[i] + from, e->down_bias + from, to - from);
  }
}
