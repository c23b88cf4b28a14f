/* Page size, floating-point control and clock ticks of the host's CPU, which is x86-64 or aarch64. */
#ifndef OCP_EMULATOR_HOST_CPU_H
#define OCP_EMULATOR_HOST_CPU_H

#include <stdint.h>

#if defined(__x86_64__)
#include <x86intrin.h>

#define EMU_PAGE 4096u /* bytes of a page */
typedef uint32_t emu_float_control;
#define EMU_FLOAT_DEFAULT 0x1f80u /* round to nearest even, subnormals kept, exceptions masked */
#define EMU_FLOAT_STATUS 0x3fu    /* flags of past operations, which do not change results */

static inline emu_float_control emu_float_control_read(void) { return _mm_getcsr(); }
static inline void emu_float_control_write(emu_float_control control) { _mm_setcsr(control); }
/* Returns the control word with the rounding mode: 0 to nearest even, 1 down, 2 up, 3 towards zero. */
static inline emu_float_control emu_float_rounding(emu_float_control control, uint32_t mode) {
  return (control & ~0x6000u) | mode << 13;
}
/* Returns a monotonic time in ticks of the time stamp counter, two to five per nanosecond. */
static inline uint64_t emu_ticks(void) { return __rdtsc(); }

#elif defined(__aarch64__)

#define EMU_PAGE                                                                                                       \
  65536u /* the largest page of a Linux kernel for aarch64, and a multiple of the others (4 and 16 KiB) */
typedef uint64_t emu_float_control;
#define EMU_FLOAT_DEFAULT 0u /* round to nearest even, subnormals kept, no traps */
#define EMU_FLOAT_STATUS 0u  /* the flags of past operations are in another register */

static inline emu_float_control emu_float_control_read(void) {
  uint64_t control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}
static inline void emu_float_control_write(emu_float_control control) {
  __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory");
}
/* Returns the control word with the rounding mode: 0 to nearest even, 1 down, 2 up, 3 towards zero. */
static inline emu_float_control emu_float_rounding(emu_float_control control, uint32_t mode) {
  static const uint64_t field[] = {0, 2, 1, 3};
  return (control & ~((uint64_t)3 << 22)) | field[mode & 3] << 22;
}
/* Returns a monotonic time in ticks, three per nanosecond: the counter of the CPU, scaled by its frequency. */
static inline uint64_t emu_ticks(void) {
  uint64_t count, frequency;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(count));
  __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(frequency));
  return (uint64_t)((double)count * (3e9 / (double)frequency));
}

#else
#error "the emulated device runs on x86-64 and aarch64 only"
#endif

#endif
