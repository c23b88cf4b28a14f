/* Functions of the C library that kernels from PTX call, and the C library lacks in this form. */
#ifndef OCP_EMULATOR_CALLS_DEVICE_FUNCTIONS_H
#define OCP_EMULATOR_CALLS_DEVICE_FUNCTIONS_H

#include <stdint.h>

#include "emulator/kernel.h"

/* Computes a double with a directed rounding. operation: add, sub, mul, fma, div, sqrt; mode: the rounding control of
 * x86, 1 down, 2 up, 3 toward 0. */
double ocp_emu_directed(uint32_t operation, uint32_t mode, double a, double b, double c);
/* Nanoseconds of the host's monotonic clock. */
uint64_t ocp_emu_clock(void);
/* vprintf of CUDA: writes to the process's standard output. `arguments` has the values, each aligned to its size.
 * Returns the number of values. */
uint32_t ocp_emu_printf(ocp_emu_thread *thread, const char *format, const uint8_t *arguments);

#endif
