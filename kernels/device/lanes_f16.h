// The same with products summed in F16, two lanes in a word.
//
// A row of x is multiplied by the power of two that brings its largest value to 1 .. 2, rounded to F16, and filled up
// with zeros to whole words of all lanes; weights are rounded to F32, then to F16. A lane adds a run of 256 columns,
// eight of them its own, by F16 FMA from zero, and the run's sum to its F32; lanes are added in the tree, in F32, and
// the sum is multiplied by the power of two that takes the first one back. So what gate and up give may be of any size,
// and the error does not grow with the length of a row.
typedef u32 part;
#define PARTS 2
#define RUN 256
#define ADD(a, b, c) PAIR_FMA(a, b, c)
#define WORDS(cols) (((cols) + LANES - 1) / LANES * (LANES / 2)) // of a row of x; behind them is its scale

#define START(R)                                         \
  part acc[R][COLUMNS][PARTS];                           \
  float lanes[R][COLUMNS][4];                            \
  for (int r = 0; r < R; r++)                            \
    for (int c = 0; c < COLUMNS; c++) {                  \
      for (int i = 0; i < PARTS; i++) acc[r][c][i] = 0;  \
      for (int i = 0; i < 4; i++) lanes[r][c][i] = 0.0f; \
    }
#define SETTLE(R, due)          \
  if (due)                      \
    for (int r = 0; r < R; r++) \
      for (int c = 0; c < COLUMNS; c++) settle(acc[r][c], lanes[r][c])
#define LANE(r, c, i) lanes[r][c][i]
#define SCALED(sum, c) ((sum) * FLOAT(x[(i64)from[first + (c)] * x_stride + WORDS(cols)]))

// The end of a run
DEVICE void settle(part *acc, float *lanes) {
  for (int i = 0; i < PARTS; i++) {
    lanes[2 * i] = lanes[2 * i] + LOW(acc[i]);
    lanes[2 * i + 1] = lanes[2 * i + 1] + HIGH(acc[i]);
    acc[i] = 0;
  }
}
DEVICE void to_parts(const float *w, part *to) {
  for (int i = 0; i < PARTS; i++) to[i] = PAIR(w[2 * i], w[2 * i + 1]);
}
DEVICE void take_parts(GLOBAL const u8 *p, int sub, int lane, part *to) {
  float w[4];
  take(p, sub, lane, w);
  to_parts(w, to);
}
// Four values of a row of x from column k on, a multiple of four
DEVICE void parts_at(GLOBAL const part *row, int k, part *to) {
  for (int i = 0; i < PARTS; i++) to[i] = row[k / 2 + i];
}
#if defined(IS_FLOAT)
// The columns from k on, fewer than there are lanes; the others are zeros
DEVICE void add_last(GLOBAL const u8 *p, GLOBAL const part *row, int k, int lane, int cols, part *acc) {
  float w[4];
  part a[PARTS], b[PARTS];
  if (k >= cols) return;
  for (int i = 0; i < 4; i++) w[i] = k + lane + i < cols ? weight_at(p, lane + i) : 0.0f;
  to_parts(w, a);
  parts_at(row, k + lane, b);
  for (int i = 0; i < PARTS; i++) acc[i] = ADD(a[i], b[i], acc[i]);
}
#endif

// Rows [.., cols] of x to what products read: a group for each, `stride` words apart
KERNEL(64)
void round_rows(GLOBAL const float *RESTRICT x, GLOBAL part *RESTRICT out, int cols, int stride) {
  SHARED(u32, most, 64);
  GLOBAL const float *row = x + (i64)GROUP * cols;
  GLOBAL part *to = out + (i64)GROUP * stride;
  u32 largest = 0;
  for (int k = ITEM; k < cols; k += 64) {
    u32 size = BITS(row[k]) & 0x7FFFFFFFu;
    largest = size > largest ? size : largest;
  }
  most[ITEM] = largest;
  BARRIER();
  largest = 0;
  for (int i = 0; i < 64; i++) largest = most[i] > largest ? most[i] : largest;
  // Both powers of two are normal numbers: the smallest rows stay below 1, the largest come to 2 .. 4.
  int e = (int)(largest >> 23);
  e = e < 1 ? 1 : e > 253 ? 253 : e;
  float up = FLOAT((u32)(254 - e) << 23);
  for (int i = ITEM; i < WORDS(cols); i += 64) {
    float a = 2 * i < cols ? row[2 * i] * up : 0.0f, b = 2 * i + 1 < cols ? row[2 * i + 1] * up : 0.0f;
    to[i] = PAIR(a, b);
  }
  if (ITEM == 0) to[WORDS(cols)] = (u32)e << 23;
}
