// The dense path beside products: norms, RoPE, softmax, attention over a cache, and the merging of experts' rows.
#define ROW_ITEMS 32  // of a group that works on one row: an item a lane
#define WIDE_ITEMS 64 // of a group whose items are on their own

// ---- one value an item

enum elementwise { COPY, ADD, MUL, SCALE, SOFTCAP, BIAS, SIGMOID, SILU_OF, GELU_OF, GELU_TANH_OF, RELU_OF, GATE };
// out[i] = f(x[i], y[...]) over rows of `width` values (out may be x). y has rows of y_width values (`width`, or one
// for the whole row), or with y_rows 1 one row for all. GATE: activation `word` of x, times y.
KERNEL(WIDE_ITEMS)
void elementwise(GLOBAL float *out, GLOBAL const float *x, GLOBAL const float *y, int op, int width, int y_width,
                 int y_rows, float f, int word) {
  int j = GROUP * WIDE_ITEMS + ITEM, row = GROUP_Y;
  if (j >= width) return;
  i64 at = (i64)row * width + j;
  float a = x[at], b = 0.0f;
  if (op == ADD || op == MUL || op == BIAS || op == GATE)
    b = y[(y_rows == 1 ? 0 : (i64)row * y_width) + (y_width == 1 ? 0 : j)];
  float r = a;
  if (op == ADD || op == BIAS)
    r = a + b;
  else if (op == MUL)
    r = a * b;
  else if (op == SCALE)
    r = a * f;
  else if (op == SOFTCAP)
    r = f * hyperbolic_tangent(divide(a, f));
  else if (op == SIGMOID)
    r = sigmoid(a);
  else if (op == SILU_OF)
    r = silu(a);
  else if (op == GELU_OF)
    r = gelu(a);
  else if (op == GELU_TANH_OF)
    r = gelu_tanh(a);
  else if (op == RELU_OF)
    r = relu(a);
  else if (op == GATE)
    r = activate(word, a) * b;
  out[at] = r;
}
// Values `from` to from + taken of each of `heads` heads
KERNEL(WIDE_ITEMS)
void split(GLOBAL float *RESTRICT out, GLOBAL const float *RESTRICT x, int heads, int head_width, int from, int taken) {
  int j = GROUP * WIDE_ITEMS + ITEM;
  if (j >= heads * taken) return;
  out[(i64)GROUP_Y * heads * taken + j] = x[((i64)GROUP_Y * heads + j / taken) * head_width + from + j % taken];
}
// Rows wanted[y] of x
KERNEL(WIDE_ITEMS)
void pick_rows(GLOBAL float *RESTRICT out, GLOBAL const float *RESTRICT x, GLOBAL const int *RESTRICT wanted,
               int width) {
  int j = GROUP * WIDE_ITEMS + ITEM;
  if (j < width) out[(i64)GROUP_Y * width + j] = x[(i64)wanted[GROUP_Y] * width + j];
}
// Turn pairs (i, i + n/2) of each head's first n values, or neighbours (2 i, 2 i + 1); the rest stays as it is.
KERNEL(WIDE_ITEMS)
void rope(GLOBAL float *x, GLOBAL const int *RESTRICT positions, GLOBAL const float *RESTRICT cosines,
          GLOBAL const float *RESTRICT sines, int heads, int head_width, int n, int neighbours) {
  int j = GROUP * WIDE_ITEMS + ITEM, turns = n / 2;
  if (j >= heads * turns) return;
  int i = j % turns;
  i64 at = ((i64)GROUP_Y * heads + j / turns) * head_width, turn = (i64)positions[GROUP_Y] * turns + i;
  i64 first = at + (neighbours ? 2 * i : i), second = at + (neighbours ? 2 * i + 1 : i + turns);
  float a = x[first], b = x[second], c = cosines[turn], s = sines[turn];
  x[first] = a * c - b * s;
  x[second] = a * s + b * c;
}

// ---- one row a group, one lane an item

DEVICE float sum_of_lanes(LOCAL float *lanes, float mine) { // the same in every item
  lanes[ITEM] = mine;
  BARRIER();
  if (ITEM == 0) lanes[0] = tree(lanes);
  BARRIER();
  float sum = lanes[0];
  BARRIER();
  return sum;
}
// Rows of n values, group x of them, each by its root mean square, times weights
KERNEL(ROW_ITEMS)
void rms_norm(GLOBAL float *out, GLOBAL const float *x, GLOBAL const float *RESTRICT weight, int n, float eps) {
  SHARED(float, lanes, LANES);
  i64 at = (i64)GROUP * n;
  float sum = 0.0f;
  for (int i = ITEM; i < n; i += LANES) sum = FMA(x[at + i], x[at + i], sum);
  sum = sum_of_lanes(lanes, sum);
  float by = divide(1.0f, square_root(divide(sum, (float)n) + eps));
  for (int i = ITEM; i < n; i += LANES) out[at + i] = x[at + i] * by * weight[i];
}
KERNEL(ROW_ITEMS)
void softmax(GLOBAL float *x, int n) {
  SHARED(float, lanes, LANES);
  i64 at = (i64)GROUP * n;
  float top = x[at];
  for (int i = 1; i < n; i++) top = x[at + i] > top || top != top ? x[at + i] : top;
  BARRIER(); // all have read the row before it is written
  float sum = 0.0f;
  for (int i = ITEM; i < n; i += LANES) {
    float e = exponential(x[at + i] - top);
    x[at + i] = e;
    sum = sum + e;
  }
  sum = sum_of_lanes(lanes, sum);
  for (int i = ITEM; i < n; i += LANES) x[at + i] = divide(x[at + i], sum);
}
// Chosen weights by their sum, ascending, which counts as at least 2^-14; one row an item
KERNEL(WIDE_ITEMS)
void normalize_rows(GLOBAL float *w, int rows, int n) {
  int row = GROUP * WIDE_ITEMS + ITEM;
  if (row >= rows) return;
  GLOBAL float *at = w + (i64)row * n;
  float sum = at[0];
  for (int i = 1; i < n; i++) sum = sum + at[i];
  if (sum < 6.103515625e-5f) sum = 6.103515625e-5f;
  for (int i = 0; i < n; i++) at[i] = divide(at[i], sum);
}

// ---- attention: keys and values are [kv heads][capacity][width]

// Keep rows first to first + (group y) of keys and values at positions start + (group y).
KERNEL(WIDE_ITEMS)
void append(GLOBAL float *RESTRICT keys, GLOBAL float *RESTRICT values, GLOBAL const float *RESTRICT k,
            GLOBAL const float *RESTRICT v, int first, int start, int kv_heads, int width, int value_width,
            int capacity) {
  int j = GROUP * WIDE_ITEMS + ITEM, row = first + GROUP_Y, position = start + GROUP_Y;
  if (j < kv_heads * width)
    keys[((i64)(j / width) * capacity + position) * width + j % width] = k[(i64)row * kv_heads * width + j];
  if (j < kv_heads * value_width)
    values[((i64)(j / value_width) * capacity + position) * value_width + j % value_width] =
        v[(i64)row * kv_heads * value_width + j];
}
// Move what is cached to a greater room: group y is a kv head.
KERNEL(WIDE_ITEMS)
void regrow(GLOBAL float *RESTRICT to, GLOBAL const float *RESTRICT from, int count, int to_stride, int from_stride) {
  int j = GROUP * WIDE_ITEMS + ITEM;
  if (j < count) to[(i64)GROUP_Y * to_stride + j] = from[(i64)GROUP_Y * from_stride + j];
}
// Scores are canonical products, one key an item; the maximum is taken over the keys that are seen; key p adds to the
// softmax's sum in lane p mod 32; values are summed over ascending keys in blocks of 256 from position 0, blocks added
// in ascending order, then divided by the sum. Group (x, y): head x of row first + y, which stands at start + y.
#define KEY_BLOCK 256
KERNEL(WIDE_ITEMS)
void attention(GLOBAL float *RESTRICT out, GLOBAL const float *RESTRICT q, GLOBAL const float *RESTRICT keys,
               GLOBAL const float *RESTRICT values, GLOBAL float *scores, GLOBAL const float *RESTRICT sinks, int first,
               int start, int heads, int kv_heads, int width, int value_width, int capacity, int room, int window,
               int has_sinks, float scale, float softcap) {
  SHARED(float, shared, WIDE_ITEMS + 1);
  int head = GROUP, row = first + GROUP_Y, position = start + GROUP_Y, kv_head = head / (heads / kv_heads);
  int from = window > 0 && position + 1 > window ? position + 1 - window : 0, base = from / LANES * LANES;
  GLOBAL float *e = scores + ((i64)GROUP_Y * heads + head) * room - base; // e[p] is key p's
  GLOBAL const float *query = q + ((i64)row * heads + head) * width;
  float top = has_sinks ? sinks[head] : FLOAT(0xFF800000u);
  for (int p = from + ITEM; p <= position; p += WIDE_ITEMS) {
    GLOBAL const float *key = keys + ((i64)kv_head * capacity + p) * width;
    float acc[LANES];
    for (int i = 0; i < LANES; i++) acc[i] = 0.0f;
    int k = 0;
    for (; k + LANES <= width; k += LANES)
      for (int i = 0; i < LANES; i++) acc[i] = FMA(key[k + i], query[k + i], acc[i]);
    for (int i = 0; i < LANES; i++) // what does not fill the lanes; never out of reach
      if (k + i < width) acc[i] = FMA(key[k + i], query[k + i], acc[i]);
    for (int i = 0; i < 16; i++) acc[i] = acc[i] + acc[i + 16];
    for (int i = 0; i < 8; i++) acc[i] = acc[i] + acc[i + 8];
    for (int i = 0; i < 4; i++) acc[i] = acc[i] + acc[i + 4];
    for (int i = 0; i < 2; i++) acc[i] = acc[i] + acc[i + 2];
    float s = (acc[0] + acc[1]) * scale;
    if (softcap > 0.0f) s = softcap * hyperbolic_tangent(divide(s, softcap));
    e[p] = s;
    top = s > top ? s : top;
  }
  shared[ITEM] = top;
  BARRIER();
  for (int i = 0; i < WIDE_ITEMS; i++) top = shared[i] > top ? shared[i] : top;
  for (int p = from + ITEM; p <= position; p += WIDE_ITEMS) e[p] = exponential(e[p] - top);
  BARRIER();
  if (ITEM < LANES) {
    float sum = 0.0f;
    for (int p = base + ITEM; p <= position; p += LANES)
      if (p >= from) sum = sum + e[p];
    shared[ITEM] = sum;
  }
  BARRIER();
  if (ITEM == 0) {
    float sum = tree(shared);
    if (has_sinks) sum = sum + exponential(sinks[head] - top);
    shared[WIDE_ITEMS] = sum;
  }
  BARRIER();
  float sum = shared[WIDE_ITEMS];
  for (int d = ITEM; d < value_width; d += WIDE_ITEMS) {
    GLOBAL const float *value = values + (i64)kv_head * capacity * value_width + d;
    float total = 0.0f;
    for (int p = from; p <= position;) {
      int end = (p / KEY_BLOCK + 1) * KEY_BLOCK;
      end = end < position + 1 ? end : position + 1;
      int is_first = p == from;
      float some = 0.0f;
      for (; p < end; p++) some = FMA(e[p], value[(i64)p * value_width], some);
      total = is_first ? some : total + some;
    }
    out[((i64)row * heads + head) * value_width + d] = divide(total, sum);
  }
}

// ---- experts' rows merged

// out[row] = sum over slots of rows[row * k + slot] * weights[row][slot], each product rounded, then added
KERNEL(WIDE_ITEMS)
void merge(GLOBAL float *RESTRICT out, GLOBAL const float *RESTRICT rows, GLOBAL const float *RESTRICT weights, int k,
           int width) {
  int j = GROUP * WIDE_ITEMS + ITEM;
  if (j >= width) return;
  i64 row = GROUP_Y;
  float sum = rows[row * k * width + j] * weights[row * k];
  for (int i = 1; i < k; i++) sum = sum + rows[(row * k + i) * width + j] * weights[row * k + i];
  out[row * width + j] = sum;
}
// bad[row] = whether a value of a row is no finite number
KERNEL(ROW_ITEMS)
void look_for_bad(GLOBAL int *RESTRICT bad, GLOBAL const float *RESTRICT x, int width) {
  SHARED(int, found, LANES);
  int mine = 0;
  for (int i = ITEM; i < width; i += LANES) mine |= (BITS(x[(i64)GROUP * width + i]) & 0x7F800000u) == 0x7F800000u;
  found[ITEM] = mine;
  BARRIER();
  if (ITEM == 0) {
    for (int i = 1; i < LANES; i++) mine |= found[i];
    bad[GROUP] = mine;
  }
}
