/* Kernels for the tests of the emulated device: C code with the interface of compiled kernels (emulator/kernel.h). */
#include "emulator/blocks/check.h"
#include "emulator/blocks/fiber.h"
#include "emulator/blocks/warp.h"
#include "emulator/kernel.h"

typedef const void *const *Params;
#define POINTER(type, i) (*(type *const *)params[i])
#define VALUE(type, i) (*(const type *)params[i])
#define META(name, mode, shared, checked, count, ...)                                                                  \
  const ocp_emu_kernel_meta name##_meta __asm__(#name ".meta") = {                                                     \
      OCP_EMU_META_VERSION, mode, shared, 0, checked, count, {__VA_ARGS__}}
#define P OCP_EMU_PARAM_POINTER

static unsigned linear(const ocp_emu_thread *t) {
  return t->tid[0] + t->ntid[0] * (t->tid[1] + t->ntid[1] * t->tid[2]);
}
static unsigned threads(const ocp_emu_thread *t) { return t->ntid[0] * t->ntid[1] * t->ntid[2]; }

/* c[i] = a[i] + b[i] */
void add(Params params, ocp_emu_thread *t) {
  for (unsigned x = 0; x < t->ntid[0]; x++) {
    unsigned i = t->ctaid[0] * t->ntid[0] + x;
    if (i < VALUE(unsigned, 3))
      POINTER(float, 2)[i] = POINTER(const float, 0)[i] + POINTER(const float, 1)[i];
  }
}
META(add, OCP_EMU_BLOCK, 0, 0, 4, P, P, P, 4);

/* out[i] += amount, once per launch, so that results show how often the kernel ran. */
void bump(Params params, ocp_emu_thread *t) {
  for (unsigned x = 0; x < t->ntid[0]; x++)
    POINTER(int, 0)[t->ctaid[0] * t->ntid[0] + x] += VALUE(int, 1);
}
META(bump, OCP_EMU_BLOCK, 0, 0, 2, P, 4);

/* out[i] = out[i] * factor + addend. Launches do not commute, so results show their order. */
void affine(Params params, ocp_emu_thread *t) {
  for (unsigned x = 0; x < t->ntid[0]; x++) {
    int *out = &POINTER(int, 0)[t->ctaid[0] * t->ntid[0] + x];
    *out = *out * VALUE(int, 1) + VALUE(int, 2);
  }
}
META(affine, OCP_EMU_BLOCK, 0, 0, 3, P, 4, 4);

/* Writes ten int32 per thread of the grid: block index, thread index, lane, ntid.y, nctaid.z, dynamic shared bytes. */
void indices(Params params, ocp_emu_thread *t) {
  unsigned block = t->ctaid[0] + t->nctaid[0] * (t->ctaid[1] + t->nctaid[1] * t->ctaid[2]);
  int *out = POINTER(int, 0) + 10 * (block * threads(t) + linear(t));
  ocp_emu_barrier(t);
  for (int axis = 0; axis < 3; axis++) {
    out[axis] = (int)t->ctaid[axis];
    out[3 + axis] = (int)t->tid[axis];
  }
  out[6] = (int)t->laneid;
  out[7] = (int)t->ntid[1];
  out[8] = (int)t->nctaid[2];
  out[9] = (int)t->dynamic_shared;
}
META(indices, OCP_EMU_FIBER, 0, 0, 1, P);

/* Reverses each block's values through shared memory, `rounds` times, with a barrier around each. */
void reverse(Params params, ocp_emu_thread *t) {
  int *values = (int *)t->shared, *data = POINTER(int, 0) + t->ctaid[0] * threads(t);
  unsigned self = linear(t), last = threads(t) - 1;
  values[self] = data[self];
  for (int round = 0; round < VALUE(int, 1); round++) {
    ocp_emu_barrier(t);
    int value = values[last - self];
    ocp_emu_barrier(t);
    values[self] = value;
  }
  data[self] = values[self];
}
META(reverse, OCP_EMU_FIBER, 4096, 0, 2, P, 4);

/* Like `reverse`, in dynamic shared memory. */
void reverse_dynamic(Params params, ocp_emu_thread *t) { reverse(params, t); }
META(reverse_dynamic, OCP_EMU_FIBER, 0, 0, 2, P, 4);

/* Shuffles the values i + 100 once, with the parameters mask, mode, lane and clamp; stores results in out[i] and
 * predicates[i]. */
void shuffle(Params params, ocp_emu_thread *t) {
  unsigned i = linear(t), predicate = 9;
  if (!(VALUE(unsigned, 2) >> (i % 32) & 1))
    return;
  POINTER(unsigned, 0)
  [i] = ocp_emu_shfl(t, VALUE(unsigned, 2), VALUE(unsigned, 3), i + 100, VALUE(unsigned, 4), VALUE(unsigned, 5),
                     &predicate);
  POINTER(unsigned, 1)[i] = predicate;
}
META(shuffle, OCP_EMU_FIBER, 0, 0, 6, P, P, 4, 4, 4, 4);

/* Sums a block's values: by shuffles within warps, by shared memory between warps; some warps end early. */
void block_sum(Params params, ocp_emu_thread *t) {
  unsigned self = linear(t), sum = POINTER(const unsigned, 0)[t->ctaid[0] * threads(t) + self];
  for (unsigned by = 16; by; by /= 2)
    sum += ocp_emu_shfl(t, UINT32_MAX, 2, sum, by, 31, 0);
  unsigned *partial = (unsigned *)t->shared;
  if (self % 32 == 0)
    partial[self / 32] = sum;
  ocp_emu_barrier(t);
  if (self >= 32)
    return;
  sum = self < threads(t) / 32 ? partial[self] : 0;
  for (unsigned by = 16; by; by /= 2)
    sum += ocp_emu_shfl(t, UINT32_MAX, 3, sum, by, 31, 0);
  if (self == 0)
    POINTER(unsigned, 1)[t->ctaid[0]] = sum;
}
META(block_sum, OCP_EMU_FIBER, 128, 0, 2, P, P);

/* Each half of a warp shuffles with its own mask, a different number of times. */
void halves(Params params, ocp_emu_thread *t) {
  unsigned lane = t->laneid, value = lane;
  unsigned mask = lane < 16 ? 0xffffu : 0xffff0000u;
  for (unsigned round = 0; round < (lane < 16 ? 3u : 7u); round++)
    value = ocp_emu_shfl(t, mask, 3, value, 1, 31, 0) + 1;
  ocp_emu_warp_barrier(t, UINT32_MAX);
  POINTER(unsigned, 0)[lane] = value;
}
META(halves, OCP_EMU_FIBER, 0, 0, 1, P);

/* out[4 * i + mode] = the vote with that mode (0 to 3) on whether value[i] is positive. */
void vote(Params params, ocp_emu_thread *t) {
  unsigned i = linear(t);
  for (unsigned mode = 0; mode < 4; mode++)
    POINTER(unsigned, 1)[4 * i + mode] = ocp_emu_vote(t, UINT32_MAX, mode, POINTER(const int, 0)[i] > 0);
}
META(vote, OCP_EMU_FIBER, 0, 0, 2, P, P);

/* Only threads with an index below a parameter reach the barrier, which is an error of the kernel. */
void divergent(Params params, ocp_emu_thread *t) {
  if (t->tid[0] < VALUE(unsigned, 0))
    ocp_emu_barrier(t);
}
META(divergent, OCP_EMU_FIBER, 0, 1, 1, 4);

/* Uses more than 40000 bytes of stack per thread, to test stack sizes and guard pages. */
void deep(Params params, ocp_emu_thread *t) {
  volatile unsigned char room[40000];
  for (unsigned i = 0; i < sizeof room; i += 256)
    room[i] = (unsigned char)t->tid[0];
  ocp_emu_barrier(t);
  unsigned sum = 0;
  for (unsigned i = 0; i < sizeof room; i += 256)
    sum += room[i];
  POINTER(unsigned, 0)[linear(t)] = sum;
}
META(deep, OCP_EMU_FIBER, 0, 0, 1, P);

float expf(float);
float erff(float);
/* x[i] = erff(expf(x[i])) */
void math(Params params, ocp_emu_thread *t) {
  for (unsigned x = 0; x < t->ntid[0]; x++) {
    float *value = &POINTER(float, 0)[t->ctaid[0] * t->ntid[0] + x];
    *value = erff(expf(*value));
  }
}
META(math, OCP_EMU_BLOCK, 0, 0, 1, P);

/* Sums the parameters of every size. */
void parameters(Params params, ocp_emu_thread *t) {
  (void)t;
  *POINTER(double, 0) = VALUE(signed char, 1) + VALUE(short, 2) + VALUE(int, 3) + (double)VALUE(long long, 4) +
                        (double)VALUE(float, 5) + VALUE(double, 6);
}
META(parameters, OCP_EMU_BLOCK, 0, 0, 7, P, 1, 2, 4, 8, 4, 8);

/* ---- kernels with the calls of the checking mode ---- */

/* Assigns to[i + to_shift] = from[i + from_shift] in thread i of the grid. */
void checked_copy(Params params, ocp_emu_thread *t) {
  for (unsigned x = 0; x < t->ntid[0]; x++) {
    unsigned i = t->ctaid[0] * t->ntid[0] + x;
    t->tid[0] = x;
    const int *from = &POINTER(const int, 0)[(int)i + VALUE(int, 1)];
    int *to = &POINTER(int, 2)[(int)i + VALUE(int, 3)];
    ocp_emu_check_load(t, from, 4);
    int value = *from;
    ocp_emu_check_store(t, to, 4);
    *to = value;
  }
}
META(checked_copy, OCP_EMU_BLOCK, 0, 1, 4, P, 4, P, 4);

/* Each thread stores a value in shared memory, and after a barrier, which needs fibers, adds one atomically to a total.
 * Parameter 2 shifts the index of the value that each thread adds; a large one leads out of the shared array. */
void checked_shared(Params params, ocp_emu_thread *t) {
  int *values = (int *)t->shared;
  unsigned self = t->tid[0];
  ocp_emu_check_load(t, &POINTER(const int, 0)[self], 4);
  ocp_emu_check_store(t, &values[self], 4);
  values[self] = POINTER(const int, 0)[self];
  ocp_emu_barrier(t);
  ocp_emu_check_load(t, &values[(int)self + VALUE(int, 2)], 4);
  int value = values[(int)self + VALUE(int, 2)];
  ocp_emu_check_atomic(t, &POINTER(int, 1)[0], 4);
  __atomic_fetch_add(&POINTER(int, 1)[0], value, __ATOMIC_RELAXED);
}
META(checked_shared, OCP_EMU_FIBER, 128, 1, 3, P, P, 4);
