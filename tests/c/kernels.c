/* Kernels for the C tests, with the interface of compiled kernels (emulator/kernel.h). Tests compile this file with
 * gcc -c -mcmodel=large -fno-pic. */
#include "emulator/blocks/fiber.h"
#include "emulator/kernel.h"

#define META(kernel, ...)                                                                                              \
  const ocp_emu_kernel_meta kernel##_meta __asm__(#kernel ".meta") = {.version = OCP_EMU_META_VERSION, __VA_ARGS__}

/* out[i] = a[i] + b[i] for i < n; one call runs a whole block. */
void add(const void *const *params, ocp_emu_thread *thread);
META(add, .mode = OCP_EMU_BLOCK, .num_params = 4,
     .params = {OCP_EMU_PARAM_POINTER, OCP_EMU_PARAM_POINTER, OCP_EMU_PARAM_POINTER, 8});

void add(const void *const *params, ocp_emu_thread *thread) {
  const float *a = *(const float *const *)params[0], *b = *(const float *const *)params[1];
  float *out = *(float *const *)params[2];
  long n = *(const long *)params[3], first = (long)thread->ctaid[0] * thread->ntid[0];
  for (long i = first; i < n && i < first + (long)thread->ntid[0]; i++)
    out[i] = a[i] + b[i];
}

/* Replaces each element of `data` by the sum of its block's elements, through shared memory; one call runs one
 * thread. */
void block_sum(const void *const *params, ocp_emu_thread *thread);
META(block_sum, .mode = OCP_EMU_FIBER, .static_shared_bytes = 256 * sizeof(float), .stack_bytes = 512, .num_params = 2,
     .params = {OCP_EMU_PARAM_POINTER, 8});

void block_sum(const void *const *params, ocp_emu_thread *thread) {
  float *data = *(float *const *)params[0], *shared = (float *)(void *)thread->shared;
  long n = *(const long *)params[1], i = (long)thread->ctaid[0] * thread->ntid[0] + thread->tid[0];
  shared[thread->tid[0]] = i < n ? data[i] : 0;
  ocp_emu_barrier(thread);
  for (unsigned half = thread->ntid[0] / 2; half; half /= 2) {
    if (thread->tid[0] < half)
      shared[thread->tid[0]] += shared[thread->tid[0] + half];
    ocp_emu_barrier(thread);
  }
  if (i < n)
    data[i] = shared[0];
}
