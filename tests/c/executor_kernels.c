/* Kernels of the executor's tests, in the emulated device's format (csrc_shim/emulator/kernel.h). */
#include "emulator/kernel.h"

#define META(kernel, count, ...)                                                                                       \
  const ocp_emu_kernel_meta kernel##_meta __asm__(#kernel ".meta") = {                                                 \
      .version = OCP_EMU_META_VERSION, .mode = OCP_EMU_BLOCK, .num_params = count, .params = {__VA_ARGS__}}
#define POINTER(type, index) (*(type *const *)params[index])
#define VALUE(type, index) (*(const type *)params[index])

static int64_t block_start(const ocp_emu_thread *thread) { return (int64_t)thread->ctaid[0] * thread->ntid[0]; }
static int64_t block_end(const ocp_emu_thread *thread, int64_t count) {
  const int64_t end = block_start(thread) + thread->ntid[0];
  return end < count ? end : count;
}

/* y[i] = a * x[i] + b for i < n. Parameters: x, y, n (int64), a (float), b (float). */
void affine(const void *const *params, ocp_emu_thread *thread) {
  const float *x = POINTER(const float, 0);
  float *y = POINTER(float, 1);
  for (int64_t i = block_start(thread); i < block_end(thread, VALUE(int64_t, 2)); i++)
    y[i] = VALUE(float, 3) * x[i] + VALUE(float, 4);
}
META(affine, 5, 0x80, 0x80, 8, 4, 4);

/* z[i] = x[i] + y[i] for i < n. Parameters: x, y, z, n (int32). */
void add(const void *const *params, ocp_emu_thread *thread) {
  for (int64_t i = block_start(thread); i < block_end(thread, VALUE(int32_t, 3)); i++)
    POINTER(float, 2)[i] = POINTER(const float, 0)[i] + POINTER(const float, 1)[i];
}
META(add, 4, 0x80, 0x80, 0x80, 4);

/* One thread copies the positive ones of n values to `kept`, and their number to count[0]. Parameters: x, kept, count,
 * n (int64). */
void keep_positive(const void *const *params, ocp_emu_thread *thread) {
  (void)thread;
  int64_t count = 0;
  for (int64_t i = 0; i < VALUE(int64_t, 3); i++)
    if (POINTER(const float, 0)[i] > 0)
      POINTER(float, 1)[count++] = POINTER(const float, 0)[i];
  POINTER(int64_t, 2)[0] = count;
}
META(keep_positive, 4, 0x80, 0x80, 0x80, 8);

/* Stores the values of the parameters in out[0..]. Parameters: out (int64 elements), int8, int16, int32, int64, float,
 * double. */
void parameters(const void *const *params, ocp_emu_thread *thread) {
  (void)thread;
  int64_t *out = POINTER(int64_t, 0);
  out[0] = VALUE(int8_t, 1);
  out[1] = VALUE(int16_t, 2);
  out[2] = VALUE(int32_t, 3);
  out[3] = VALUE(int64_t, 4);
  out[4] = (int64_t)(VALUE(float, 5) * 1000);
  out[5] = (int64_t)(VALUE(double, 6) * 1000);
}
META(parameters, 7, 0x80, 1, 2, 4, 8, 4, 8);

/* Does nothing. Parameters: pointer, n (int64). */
void idle(const void *const *params, ocp_emu_thread *thread) {
  (void)params;
  (void)thread;
}
META(idle, 2, 0x80, 8);
