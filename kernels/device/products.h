// Products of quantised rows and rows of F32 for one TYPE, COLUMNS rows of x at a time and ROWS rows of weights an
// item, in the canonical order: element j goes to lane j mod 32, a lane adds ascending j by FMA, lanes are added in the
// tree.
//
// Eight items share a row of weights, four lanes each: they read 32 weights side by side. A group has 64 items. What is
// multiplied is told by a table, so that one launch does many experts: first three numbers for each of the chunks: slot
// (which matrix of `w`), first and count of its members, at most COLUMNS; then for each member the row of x that it
// reads, then for each the row of y that it writes.
#define GROUP_ITEMS 64
#define TEAM 8
#define TEAMS (GROUP_ITEMS / TEAM)
#define SUMS_STRIDE (LANES + 1) // side by side in different banks

#define MEMBERS                                                                                  \
  int slot = table[3 * GROUP_Y], first = table[3 * GROUP_Y + 1], count = table[3 * GROUP_Y + 2]; \
  GLOBAL const int *from = table + 3 * chunks, *to = from + members;                             \
  GLOBAL const float *at[COLUMNS];                                                               \
  for (int i = 0; i < COLUMNS; i++) at[i] = x + (i64)from[first + (i < count ? i : 0)] * x_stride

DEVICE void four_floats(GLOBAL const float *p, float *to) {
#if defined(__OPENCL_C_VERSION__) || defined(__OPENCL_VERSION__)
  vstore4(vload4(0, p), 0, to);
#else
  struct float4_ {
    float at[4];
  } __attribute__((aligned(16))) v = *(const struct float4_ *)p;
  for (int i = 0; i < 4; i++) to[i] = v.at[i];
#endif
}

KERNEL(GROUP_ITEMS)
void products(GLOBAL const u8 *RESTRICT w, GLOBAL const float *RESTRICT x, GLOBAL const float *RESTRICT bias,
              GLOBAL float *RESTRICT y, GLOBAL const int *RESTRICT table, int chunks, int members, int rows, int cols,
              int row_bytes, int x_stride, int y_stride, int has_bias) {
  SHARED(float, sums, TEAMS * ROWS * COLUMNS * SUMS_STRIDE);
  MEMBERS;
  int lane = ITEM % TEAM * 4, base = (GROUP * TEAMS + ITEM / TEAM) * ROWS;
  GLOBAL const u8 *p[ROWS];
  for (int r = 0; r < ROWS; r++) { // rows behind the last one: computed again and not kept
    int row = base + r < rows ? base + r : rows - 1;
    p[r] = w + ((i64)slot * rows + row) * row_bytes;
  }
  float acc[ROWS][COLUMNS][4];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++)
      for (int i = 0; i < 4; i++) acc[r][c][i] = 0.0f;
  float a[4], b[4];
  int k = 0;
  for (; k + BLOCK <= cols; k += BLOCK) {
    for (int sub = 0; sub < BLOCK / LANES; sub++) {
      float weights[ROWS][4];
      for (int r = 0; r < ROWS; r++) take(p[r], sub, lane, weights[r]);
      for (int c = 0; c < COLUMNS; c++) {
#if defined(IS_FLOAT)
        for (int i = 0; i < 4; i++) b[i] = at[c][k + lane + i];
#else
        four_floats(at[c] + k + sub * LANES + lane, b);
#endif
        for (int r = 0; r < ROWS; r++)
          for (int i = 0; i < 4; i++) acc[r][c][i] = FMA(weights[r][i], b[i], acc[r][c][i]);
      }
    }
    for (int r = 0; r < ROWS; r++) p[r] += BYTES;
  }
#if defined(IS_FLOAT)
  for (int i = 0; i < 4; i++)
    if (k + lane + i < cols)
      for (int r = 0; r < ROWS; r++) {
        a[0] = weight_at(p[r], lane + i);
        for (int c = 0; c < COLUMNS; c++) acc[r][c][i] = FMA(a[0], at[c][k + lane + i], acc[r][c][i]);
      }
#endif
  (void)a;
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++)
      for (int i = 0; i < 4; i++)
        sums[((ITEM / TEAM * ROWS + r) * COLUMNS + c) * SUMS_STRIDE + lane + i] = acc[r][c][i];
  BARRIER();
  for (int s = ITEM; s < TEAMS * ROWS * COLUMNS; s += GROUP_ITEMS) {
    int c = s % COLUMNS, row = GROUP * TEAMS * ROWS + s / COLUMNS;
    if (c >= count || row >= rows) continue;
    float sum = tree(sums + s * SUMS_STRIDE);
    if (has_bias) sum = sum + bias[(i64)slot * rows + row];
    y[(i64)to[first + c] * y_stride + row] = sum;
  }
}

// activation(gate x) * (up x) of experts: both products of a row by the same items
KERNEL(GROUP_ITEMS)
void gated(GLOBAL const u8 *RESTRICT w_gate, GLOBAL const u8 *RESTRICT w_up, GLOBAL const float *RESTRICT x,
           GLOBAL const float *RESTRICT gate_bias, GLOBAL const float *RESTRICT up_bias, GLOBAL float *RESTRICT y,
           GLOBAL const int *RESTRICT table, int chunks, int members, int rows, int cols, int row_bytes, int x_stride,
           int y_stride, int has_gate_bias, int has_up_bias, int activation) {
  SHARED(float, sums, TEAMS * 2 * COLUMNS * SUMS_STRIDE);
  MEMBERS;
  int lane = ITEM % TEAM * 4, row_here = GROUP * TEAMS + ITEM / TEAM;
  i64 skip = ((i64)slot * rows + (row_here < rows ? row_here : rows - 1)) * row_bytes;
  GLOBAL const u8 *gate = w_gate + skip, *up = w_up + skip;
  float acc[2][COLUMNS][4];
  for (int r = 0; r < 2; r++)
    for (int c = 0; c < COLUMNS; c++)
      for (int i = 0; i < 4; i++) acc[r][c][i] = 0.0f;
  float b[4];
  int k = 0;
  for (; k + BLOCK <= cols; k += BLOCK) {
    for (int sub = 0; sub < BLOCK / LANES; sub++) {
      float weights[2][4];
      take(gate, sub, lane, weights[0]);
      take(up, sub, lane, weights[1]);
      for (int c = 0; c < COLUMNS; c++) {
#if defined(IS_FLOAT)
        for (int i = 0; i < 4; i++) b[i] = at[c][k + lane + i];
#else
        four_floats(at[c] + k + sub * LANES + lane, b);
#endif
        for (int r = 0; r < 2; r++)
          for (int i = 0; i < 4; i++) acc[r][c][i] = FMA(weights[r][i], b[i], acc[r][c][i]);
      }
    }
    gate += BYTES, up += BYTES;
  }
#if defined(IS_FLOAT)
  for (int i = 0; i < 4; i++)
    if (k + lane + i < cols) {
      float g = weight_at(gate, lane + i), u = weight_at(up, lane + i);
      for (int c = 0; c < COLUMNS; c++) {
        acc[0][c][i] = FMA(g, at[c][k + lane + i], acc[0][c][i]);
        acc[1][c][i] = FMA(u, at[c][k + lane + i], acc[1][c][i]);
      }
    }
#endif
  for (int r = 0; r < 2; r++)
    for (int c = 0; c < COLUMNS; c++)
      for (int i = 0; i < 4; i++) sums[((ITEM / TEAM * 2 + r) * COLUMNS + c) * SUMS_STRIDE + lane + i] = acc[r][c][i];
  BARRIER();
  for (int s = ITEM; s < TEAMS * COLUMNS; s += GROUP_ITEMS) {
    int c = s % COLUMNS, team = s / COLUMNS, row = GROUP * TEAMS + team;
    if (c >= count || row >= rows) continue;
    float g = tree(sums + ((team * 2) * COLUMNS + c) * SUMS_STRIDE);
    float u = tree(sums + ((team * 2 + 1) * COLUMNS + c) * SUMS_STRIDE);
    if (has_gate_bias) g = g + gate_bias[(i64)slot * rows + row];
    if (has_up_bias) u = u + up_bias[(i64)slot * rows + row];
    y[(i64)to[first + c] * y_stride + row] = activate(activation, g) * u;
  }
}

// Rows of a matrix as F32: row tokens[group y] to row y of `out`
KERNEL(GROUP_ITEMS)
void embed(GLOBAL const u8 *RESTRICT w, GLOBAL const int *RESTRICT tokens, GLOBAL float *RESTRICT out, int cols,
           int row_bytes) {
  GLOBAL const u8 *row = w + (i64)tokens[GROUP_Y] * row_bytes;
  GLOBAL float *to = out + (i64)GROUP_Y * cols;
  int at = (GROUP * GROUP_ITEMS + ITEM) * 4;
#if defined(IS_FLOAT)
  for (int i = 0; i < 4; i++)
    if (at + i < cols) to[at + i] = weight_at(row, at + i);
#else
  float w4[4];
  if (at < cols) {
    take(row + (i64)(at / BLOCK) * BYTES, at % BLOCK / LANES, at % LANES, w4);
    for (int i = 0; i < 4; i++) to[at + i] = w4[i];
  }
#endif
}
