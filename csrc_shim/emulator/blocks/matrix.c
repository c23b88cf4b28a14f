/* mma, ldmatrix and stmatrix of a warp (PTX ISA 9.7.14). The mma shapes have n = 8: lane 4 g + t holds elements of
 * row g (or g + 8) of a, elements of column g of b, and columns 2 t and 2 t + 1 of row g (or g + 8) of the
 * accumulators. The products are added to the accumulator in ascending order of k, as float32, float64 or 64-bit
 * integers; the sum is converted to the type of the accumulator at the end. */
#include "emulator/blocks/matrix.h"

#include <math.h>
#include <string.h>

static const uint8_t widths[] = {16, 16, 32, 8, 8, 8, 8, 4, 4, 1, 64}; /* bits of an element, by its type */

/* ---- elements ---- */

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Converts a float of a format with `exponent` and `mantissa` bits, and NaN and infinities as in IEEE 754, to float32.
 * `smallest`: the smallest positive subnormal number of the format. */
static float small_float(uint32_t bits, uint32_t exponent, uint32_t mantissa, float smallest) {
  uint32_t bias = (1u << (exponent - 1)) - 1, largest = (1u << exponent) - 1;
  uint32_t power = bits >> mantissa & largest, fraction = bits & ((1u << mantissa) - 1);
  uint32_t sign = (bits >> (exponent + mantissa) & 1) << 31;
  if (power == 0)
    return sign ? -(float)fraction * smallest : (float)fraction * smallest;
  power = power == largest ? 255 : power - bias + 127;
  return float_of(sign | power << 23 | fraction << (23 - mantissa));
}

/* e4m3 has no infinities: 0x7f is NaN, and other values with the largest exponent are numbers. */
static float e4m3(uint32_t bits) {
  uint32_t size = bits & 0x7f;
  if (size >> 3 == 15) {
    float value = size == 0x7f ? NAN : (float)((size & 7) | 8) * 32;
    return bits & 0x80 ? -value : value;
  }
  return small_float(bits, 4, 3, 0x1p-9f);
}

static float number(uint32_t kind, uint32_t bits) {
  switch (kind) {
  case EMU_F16:
    return small_float(bits, 5, 10, 0x1p-24f);
  case EMU_BF16:
    return float_of(bits << 16);
  case EMU_TF32:
    return float_of(bits & ~0x1fffu);
  case EMU_E4M3:
    return e4m3(bits);
  default:
    return small_float(bits, 5, 2, 0x1p-16f);
  }
}

static int32_t integer(uint32_t kind, uint32_t bits) {
  if (kind == EMU_S8)
    return (int8_t)bits;
  return kind == EMU_S4 ? (int32_t)(bits ^ 8) - 8 : (int32_t)bits;
}

static double wide_of(const uint32_t *words, uint32_t index) {
  double value;
  memcpy(&value, words + 2 * (size_t)index, sizeof value);
  return value;
}

/* Rounds to the nearest float16, ties to even. */
static uint16_t half_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  float size = fabsf(value);
  if (isnan(value))
    return 0x7fff;
  if (size >= 65520)
    return sign | 0x7c00;
  int power;
  frexpf(size, &power);
  int unit = (power < -13 ? -13 : power) - 11; /* exponent of the last bit's value */
  uint32_t steps = (uint32_t)nearbyintf(ldexpf(size, -unit));
  return (uint16_t)(sign | (size == 0 ? 0 : (uint32_t)((unit + 24) << 10) + steps));
}

/* ---- matrix products ---- */

enum { ROWS = EMU_MATRIX_ROWS, COLUMNS = EMU_MATRIX_COLUMNS };

typedef struct form {
  uint32_t a, b, sums, halves, words, parts;
  bool saturates, differs;
} form;

static form form_of(uint32_t bits) {
  form f = {bits & 15, bits >> 4 & 15, bits >> 8 & 3, bits >> 10 & 3, bits >> 12 & 15, 1, bits >> 16 & 1, bits >> 17};
  f.parts = f.sums == EMU_SUM_F64 ? 1 : 32u / widths[f.a];
  return f;
}

static uint32_t part_of(uint32_t kind, uint32_t word, uint32_t part) {
  uint32_t width = widths[kind];
  return width == 32 ? word : word >> part * width & ((1u << width) - 1);
}

/* Defines a function that multiplies two matrices of one number type: it gathers a and b from the lanes' registers,
 * then adds the products to `sums`. `typed` converts the bits of an element. A compiler can vectorize the innermost
 * loop, over the COLUMNS accumulators of a row. */
#define MULTIPLY(name, type, sum, typed, accumulate)                                                                   \
  static void name(emu_cpu *cpu, const emu_warp *warp, const form *f, sum sums[ROWS][COLUMNS]) {                       \
    uint32_t depth = 4 * f->words * f->parts;                                                                          \
    type(*a)[depth] = (void *)cpu->elements, (*b)[COLUMNS] = (void *)a[ROWS];                                          \
    for (uint32_t lane = 0; lane < EMU_WARP; lane++)                                                                   \
      for (uint32_t step = 0; step < f->words; step++)                                                                 \
        for (uint32_t part = 0; part < f->parts; part++) {                                                             \
          uint32_t k = (step * 4 + lane % 4) * f->parts + part;                                                        \
          b[k][lane / 4] = typed(f->b, warp->fragments[lane]->b, step);                                                \
          for (uint32_t half = 0; half < f->halves; half++)                                                            \
            a[8 * half + lane / 4][k] = typed(f->a, warp->fragments[lane]->a, half + f->halves * step);                \
        }                                                                                                              \
    for (uint32_t row = 0; row < 8 * f->halves; row++)                                                                 \
      for (uint32_t k = 0; k < depth; k++)                                                                             \
        for (uint32_t column = 0; column < COLUMNS; column++) {                                                        \
          sum x = a[row][k], y = b[k][column];                                                                         \
          accumulate;                                                                                                  \
        }                                                                                                              \
  }
#define FLOAT(kind, words, index) number(kind, part_of(kind, (words)[index], part))
#define INTEGER(kind, words, index) integer(kind, part_of(kind, (words)[index], part))
#define WIDE(kind, words, index) wide_of(words, index)
MULTIPLY(multiply_floats, float, float, FLOAT, sums[row][column] += x * y)
MULTIPLY(multiply_doubles, double, double, WIDE, sums[row][column] = fma(x, y, sums[row][column]))
MULTIPLY(multiply_integers, int32_t, int64_t, INTEGER, sums[row][column] += f->differs ? x ^ y : x * y)

static int32_t clamped(int64_t value) {
  return (int32_t)(value < INT32_MIN ? INT32_MIN : value > INT32_MAX ? INT32_MAX : value);
}

/* Runs the statement `move` for each accumulator of each lane; it can use row, column, and index (in the lane). */
#define EACH_SUM(f, move)                                                                                              \
  for (uint32_t lane = 0; lane < EMU_WARP; lane++)                                                                     \
    for (uint32_t index = 0; index < 2 * (f)->halves; index++) {                                                       \
      const emu_fragments *own = warp->fragments[lane];                                                                \
      uint32_t row = index / 2 * 8 + lane / 4, column = lane % 4 * 2 + index % 2;                                      \
      move;                                                                                                            \
    }

static void multiply_to_floats(emu_cpu *cpu, const emu_warp *warp, const form *f) {
  float sums[ROWS][COLUMNS];
  bool halves = f->sums == EMU_SUM_F16;
  EACH_SUM(f, sums[row][column] =
                  halves ? number(EMU_F16, own->c[index / 2] >> 16 * (index % 2) & 0xffff) : float_of(own->c[index]))
  multiply_floats(cpu, warp, f, sums);
  if (halves)
    EACH_SUM(f, own->d[index / 2] = (index % 2 ? own->d[index / 2] : 0) | (uint32_t)half_of(sums[row][column])
                                                                              << 16 * (index % 2))
  else
    EACH_SUM(f, memcpy(own->d + index, &sums[row][column], 4))
}

static void multiply(emu_cpu *cpu, const emu_warp *warp, const form *f) {
  if (f->sums == EMU_SUM_S32) {
    int64_t sums[ROWS][COLUMNS];
    EACH_SUM(f, sums[row][column] = (int32_t)own->c[index])
    multiply_integers(cpu, warp, f, sums);
    EACH_SUM(f, own->d[index] = f->saturates ? (uint32_t)clamped(sums[row][column]) : (uint32_t)sums[row][column])
  } else if (f->sums == EMU_SUM_F64) {
    double sums[ROWS][COLUMNS];
    EACH_SUM(f, sums[row][column] = wide_of(own->c, index))
    multiply_doubles(cpu, warp, f, sums);
    EACH_SUM(f, memcpy(own->d + 2 * (size_t)index, &sums[row][column], 8))
  } else {
    multiply_to_floats(cpu, warp, f);
  }
}

/* ---- loads and stores ---- */

/* Locates element `half` (0 or 1) of a lane's register `index` in memory. *row: the lane whose `row` pointer is the
 * address of the element's row. *column: the element's index in that row. */
static void locate(uint32_t lane, uint32_t index, uint32_t half, bool transposed, uint32_t *row, uint32_t *column) {
  uint32_t group = lane / 4, pair = lane % 4 * 2 + half;
  *row = 8 * index + (transposed ? pair : group);
  *column = transposed ? group : pair;
}

static void load(const emu_warp *warp, uint32_t count, bool transposed, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint32_t lane = (uint32_t)__builtin_ctz(rest);
    for (uint32_t index = 0; index < count; index++) {
      uint16_t pair[2] = {0, 0};
      for (uint32_t half = 0; half < 2; half++) {
        uint32_t row, column;
        locate(lane, index, half, transposed, &row, &column);
        if (mask >> row & 1)
          memcpy(&pair[half], (const uint8_t *)warp->fragments[row]->row + 2 * (size_t)column, 2);
      }
      warp->fragments[lane]->d[index] = pair[0] | (uint32_t)pair[1] << 16;
    }
  }
}

static void store(const emu_warp *warp, uint32_t count, bool transposed, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint32_t lane = (uint32_t)__builtin_ctz(rest);
    for (uint32_t index = 0; index < count; index++)
      for (uint32_t half = 0; half < 2; half++) {
        uint32_t row, column;
        locate(lane, index, half, transposed, &row, &column);
        uint16_t value = (uint16_t)(warp->fragments[lane]->a[index] >> 16 * half);
        if (mask >> row & 1)
          memcpy((uint8_t *)warp->fragments[row]->row + 2 * (size_t)column, &value, 2);
      }
  }
}

void emu_matrix_complete(emu_cpu *cpu, const emu_warp *warp, const emu_meeting *meeting, uint32_t mask) {
  uint32_t count = meeting->source;
  bool transposed = meeting->clamp != 0;
  if (meeting->operation == EMU_MULTIPLY) {
    form f = form_of(meeting->source);
    if (mask == UINT32_MAX) /* the PTX ISA requires all lanes, and else leaves the results undefined */
      multiply(cpu, warp, &f);
    return;
  }
  if (meeting->operation == EMU_STORE_MATRIX)
    store(warp, count, transposed, mask);
  else
    load(warp, count, transposed, mask);
}
