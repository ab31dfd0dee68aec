// Causal attention over cached keys and values, in the order that is fixed for every device: scores are canonical
// products; the maximum is taken over the keys that are seen; key p adds to the softmax's sum in lane p mod 32; values
// are summed over ascending keys in blocks of 256 from position 0, blocks added in ascending order, then divided by the
// sum.
#pragma once
#include "functions.h"
#include "products.h"

#define KEY_BLOCK 256
#define VALUE_V 4 // registers of a row of values at a time
#define VALUE_HEADS 4

typedef struct {
  void *keys, *values; // [kv heads][capacity][filled width], F32 or F16
  int64_t capacity;
} cache;
typedef struct {
  int32_t heads, kv_heads, width, value_width, window;
  float scale, softcap;
  const float *sinks; // of each head, or 0
  int32_t is_half;    // keys and values are kept in F16
} attention;

INLINE int first_seen(const attention *t, int64_t position) {
  return t->window > 0 && position + 1 > t->window ? (int)(position + 1 - t->window) : 0;
}
// e^(score - maximum) in place for keys start to end, where e[0] belongs to key `base`, a multiple of 32; 0 for the
// rest of the lanes. Gives the sum.
static float exponentials(const attention *t, int head, float *e, int base, int start, int end) {
  int n = filled(end - base);
  V_MAP(e, e, n, v_mul(a, v_all(t->scale)));
  if (t->softcap > 0) V_MAP(e, e, n, v_mul(v_all(t->softcap), v_tanh(v_div(a, v_all(t->softcap)))));
  for (int i = 0; i < start - base; i++) e[i] = -INFINITY;
  for (int i = end - base; i < n; i++) e[i] = -INFINITY;
  float top = t->sinks ? t->sinks[head] : -INFINITY, lane[VL];
  V most = v_all(top);
  for (int i = 0; i < n; i += VL) most = v_max(v_load(e + i), most);
  v_store(lane, most);
  for (int i = 0; i < VL; i++) top = lane[i] > top ? lane[i] : top;
  V_MAP(e, e, n, v_exp(v_sub(a, v_all(top))));
  for (int i = 0; i < start - base; i++) e[i] = 0;
  for (int i = end - base; i < n; i++) e[i] = 0;
  float total = lanes_sum(e, n, 0);
  if (t->sinks) {
    float sink[VL];
    v_store(sink, v_exp(v_all(t->sinks[head] - top)));
    total += sink[0];
  }
  return total;
}
// Keep a row of keys or values at `to`, filled up with zeros.
static void keep_row(void *to, ptrdiff_t at, const float *x, int width, int is_half) {
  if (!is_half) {
    memcpy((float *)to + at, x, sizeof(float) * (size_t)width);
    memset((float *)to + at + width, 0, sizeof(float) * (size_t)(filled(width) - width));
    return;
  }
  for (int i = 0; i < filled(width); i += VL) {
    float some[VL] = {0};
    if (i < width) memcpy(some, x + i, sizeof(float) * (size_t)(width - i < VL ? width - i : VL));
    v_store_f16((uint16_t *)to + at + i, v_load(some));
  }
}
INLINE V kept(const void *from, ptrdiff_t at, int is_half) {
  return is_half ? v_f16((const uint8_t *)from + 2 * at) : v_load((const float *)from + at);
}
INLINE void value_block(const void *values, int is_half, int stride, const float *const *e, int heads, int registers,
                        int from, int to, V out[VALUE_HEADS][VALUE_V]) {
  V acc[VALUE_HEADS][VALUE_V];
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < registers; i++) acc[h][i] = v_all(0);
  for (int p = from; p < to; p++) {
    V v[VALUE_V];
    for (int i = 0; i < registers; i++) v[i] = kept(values, (ptrdiff_t)p * stride + i * VL, is_half);
    for (int h = 0; h < heads; h++) {
      V weight = v_all(e[h][p]);
      for (int i = 0; i < registers; i++) acc[h][i] = v_fma(weight, v[i], acc[h][i]);
    }
  }
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < registers; i++) out[h][i] = acc[h][i];
}
// Weighted sums of `registers` registers of values for `heads` heads, each divided by its sum; e[h][p] is key p's
// weight
INLINE void value_sums(const void *values, int is_half, int stride, const float *const *e, const float *sums, int heads,
                       int registers, int start, int end, float *const *out) {
  V total[VALUE_HEADS][VALUE_V], some[VALUE_HEADS][VALUE_V];
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < registers; i++) total[h][i] = v_all(0); // written by the first block, for there is one
  for (int from = start; from < end;) {
    int to = (from / KEY_BLOCK + 1) * KEY_BLOCK < end ? (from / KEY_BLOCK + 1) * KEY_BLOCK : end;
    value_block(values, is_half, stride, e, heads, registers, from, to, from == start ? total : some);
    if (from != start)
      for (int h = 0; h < heads; h++)
        for (int i = 0; i < registers; i++) total[h][i] = v_add(total[h][i], some[h][i]);
    from = to;
  }
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < registers; i++) v_store(out[h] + i * VL, v_div(total[h][i], v_all(sums[h])));
}
static void values_of(const void *values, int is_half, int stride, const float *const *e, const float *sums, int heads,
                      int registers, int start, int end, float *const *out) {
#define CASE(H, R)                                                   \
  if (heads == H && registers == R) {                                \
    if (is_half)                                                     \
      value_sums(values, 1, stride, e, sums, H, R, start, end, out); \
    else                                                             \
      value_sums(values, 0, stride, e, sums, H, R, start, end, out); \
  }
  CASE(1, VALUE_V)
  CASE(2, VALUE_V)
  CASE(3, VALUE_V)
  CASE(4, VALUE_V)
#if VL == 16
  CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2)
#endif
#undef CASE
}

static size_t attention_scratch(const attention *t, int64_t keys, int rows) {
  size_t queries = (size_t)rows * (size_t)(t->heads / t->kv_heads);
  return (t->is_half ? (size_t)TILE_ROWS * (size_t)filled(t->width) : 0) +
         queries * ((size_t)filled(t->width) + (size_t)filled((int)keys) + 2 * LANES) +
         (size_t)filled(t->value_width) * VALUE_HEADS;
}
#define MOST_QUERIES 64
INLINE int rows_at_once(const attention *t) { // so many that a key is loaded for about 12 queries
  int group = t->heads / t->kv_heads;
  return group >= 12 ? 1 : 12 / group;
}
// Rows `row` to row + rows - 1 (of one sequence, at consecutive positions) of one kv head. q and out are [T][heads *
// width].
static void attend(const attention *t, const cache *c, int kv_head, int row, int rows, int64_t position, const float *q,
                   float *out, float *space) {
  int group = t->heads / t->kv_heads, stride = filled(t->width), value_stride = filled(t->value_width);
  int base = first_seen(t, position) / LANES * LANES, keys = (int)(position + rows) - base, length = filled(keys);
  ptrdiff_t k = ((ptrdiff_t)kv_head * c->capacity + base) * stride; // of the first key, in values
  const char *v = (const char *)c->values + (ptrdiff_t)kv_head * c->capacity * value_stride * (t->is_half ? 2 : 4);
  float *unpacked = space;
  if (t->is_half) space += TILE_ROWS * stride;
  float *queries = space, *scores = queries + (size_t)rows * (size_t)group * (size_t)stride,
        *result = scores + (size_t)rows * (size_t)group * (size_t)length;
  const float *x[MOST_QUERIES];
  float *at[MOST_QUERIES], sum[MOST_QUERIES];
  for (int some, first = 0; first < group; first += some) { // all heads of the group, but where there are very many
    some = group - first > MOST_QUERIES / rows ? MOST_QUERIES / rows : group - first;
    int n = rows * some;
    for (int i = 0; i < n; i++) {
      int head = kv_head * group + first + i % some;
      float *copy = queries + (size_t)i * (size_t)stride;
      memcpy(copy, q + ((size_t)(row + i / some) * (size_t)t->heads + (size_t)head) * (size_t)t->width,
             sizeof(float) * (size_t)t->width);
      memset(copy + t->width, 0, sizeof(float) * (size_t)(stride - t->width));
      x[i] = copy;
    }
    for (int p = 0; p < keys; p += TILE_ROWS) {
      for (int i = 0; i < n; i++) at[i] = scores + (size_t)i * (size_t)length + p;
      int some_keys = keys - p < TILE_ROWS ? keys - p : TILE_ROWS;
      const float *tile = (const float *)c->keys + k + (ptrdiff_t)p * stride;
      if (t->is_half) {
        for (int j = 0; j < some_keys * stride; j += VL)
          v_store(unpacked + j, kept(c->keys, k + (ptrdiff_t)p * stride + j, 1));
        tile = unpacked;
      }
      tile_products(tile, stride, some_keys, x, n, t->width, at);
    }
    for (int r = 0; r < rows; r++) {
      int start = first_seen(t, position + r), end = (int)(position + r) + 1;
      for (int i = 0; i < some; i++)
        sum[i] = exponentials(t, kv_head * group + first + i, scores + (size_t)(r * some + i) * (size_t)length, base,
                              start, end);
      for (int h = 0; h < some; h += VALUE_HEADS) {
        int heads = some - h < VALUE_HEADS ? some - h : VALUE_HEADS;
        const float *e[VALUE_HEADS];
        float *to[VALUE_HEADS];
        for (int i = 0; i < heads; i++) e[i] = scores + (ptrdiff_t)(r * some + h + i) * length - base;
        for (int d = 0; d < t->value_width; d += VALUE_V * VL) {
          int registers = value_stride - d < VALUE_V * VL ? (value_stride - d) / VL : VALUE_V;
          for (int i = 0; i < heads; i++) to[i] = result + i * VALUE_V * VL;
          values_of(v + (ptrdiff_t)d * (t->is_half ? 2 : 4), t->is_half, value_stride, e, sum + h, heads, registers,
                    start, end, to);
          int width = t->value_width - d < registers * VL ? t->value_width - d : registers * VL;
          for (int i = 0; i < heads; i++)
            memcpy(out +
                       ((size_t)(row + r) * (size_t)t->heads + (size_t)(kv_head * group + first + h + i)) *
                           (size_t)t->value_width +
                       d,
                   to[i], sizeof(float) * (size_t)width);
        }
      }
    }
  }
}
