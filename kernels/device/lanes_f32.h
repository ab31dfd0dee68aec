// What an item's four lanes are made of and how they are added to, in F32: see products.h. `lanes_f16.h` is the other.
typedef float part;
#define PARTS 4
#define ADD(a, b, c) FMA(a, b, c)
#define take_parts take

#define START(R)                      \
  part acc[R][COLUMNS][PARTS];        \
  for (int r = 0; r < R; r++)         \
    for (int c = 0; c < COLUMNS; c++) \
      for (int i = 0; i < PARTS; i++) acc[r][c][i] = 0.0f
#define SETTLE(R, due) (void)0
#define LANE(r, c, i) acc[r][c][i]
#define SCALED(sum, c) (sum)

// Four values of a row of x from column k on
DEVICE void parts_at(GLOBAL const part *row, int k, part *to) {
#if defined(IS_FLOAT)
  for (int i = 0; i < 4; i++) to[i] = row[k + i];
#elif defined(__OPENCL_C_VERSION__) || defined(__OPENCL_VERSION__)
  vstore4(vload4(0, row + k), 0, to);
#else
  struct float4_ {
    float at[4];
  } __attribute__((aligned(16))) v = *(const struct float4_ *)(row + k);
  for (int i = 0; i < 4; i++) to[i] = v.at[i];
#endif
}
#if defined(IS_FLOAT)
// The columns from k on, fewer than there are lanes
DEVICE void add_last(GLOBAL const u8 *p, GLOBAL const part *row, int k, int lane, int cols, part *acc) {
  for (int i = 0; i < 4; i++)
    if (k + lane + i < cols) acc[i] = FMA(weight_at(p, lane + i), row[k + lane + i], acc[i]);
}
#endif
