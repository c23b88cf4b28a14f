/* Functions that kernels translated from PTX call, and that the C library does not have in this form. */
#ifndef OCP_EMULATOR_CALLS_DEVICE_FUNCTIONS_H
#define OCP_EMULATOR_CALLS_DEVICE_FUNCTIONS_H

#include <stdint.h>

#include "emulator/kernel.h"

/* Computes a double with a directed rounding. operation: 0 add, 1 sub, 2 mul, 3 fma, 4 div, 5 sqrt; mode (rounding
 * control of MXCSR): 1 down, 2 up, 3 toward 0. */
double ocp_emu_directed(uint32_t operation, uint32_t mode, double a, double b, double c);
/* Returns the nanoseconds of the host's monotonic clock. */
uint64_t ocp_emu_clock(void);
/* CUDA's vprintf: writes to the standard output of the process. `arguments` holds the values, each aligned to its size.
 * Returns the number of values. */
uint32_t ocp_emu_printf(ocp_emu_thread *thread, const char *format, const uint8_t *arguments);

#endif
