/* Configuration and reports of the emulated CUDA device. Everything else goes through the driver table. */
#ifndef OCP_EMULATOR_EMULATOR_H
#define OCP_EMULATOR_EMULATOR_H

#include <stddef.h>
#include <stdint.h>

#include "driver/driver.h"

typedef struct ocp_emu_config {
  uint32_t num_devices;  /* 1 .. 8 */
  uint32_t workers;      /* threads that run blocks; 0: one per core of the process's affinity mask */
  uint64_t device_bytes; /* memory of each device; address space only until it is touched */
  uint32_t adversarial;  /* 0: inline streams; 1: deferred and interleaved by `seed` until the program waits */
  uint32_t check;        /* 1: the checking mode; needs kernels compiled with checks */
  uint64_t seed;
} ocp_emu_config;

/* The emulated devices, as configured below. Never NULL. */
const ocp_driver *ocp_driver_emulator(void);

/* Sets the configuration. Deferred work runs first. The number of devices and their memory can change only while no
 * memory, stream, event, module or graph of theirs is alive; no other thread may use the devices meanwhile. Returns 0,
 * or a CUresult with the reason in text. The defaults come from the environment: ORT_CUDA_PLUGIN_EMULATE_DEVICES,
 * _MEMORY (bytes, K/M/G suffixes), _STREAMS (inline|adversarial), _SEED, _CHECK, _WORKERS, each prefixed
 * ORT_CUDA_PLUGIN_EMULATE; one that cannot be read makes Init fail. */
int ocp_emu_configure(const ocp_emu_config *config, char *text, size_t text_bytes);
void ocp_emu_get_config(ocp_emu_config *config);

/* Findings of the checking mode since the last clear: kinds out-of-bounds, use-after-free, uninitialised-read,
 * divergent-barrier, missing-wait. Each is one line of text that names kernel, block, thread, address, bytes. A finding
 * also makes the launch fail with CUDA_ERROR_ILLEGAL_ADDRESS or CUDA_ERROR_LAUNCH_FAILED, as compute-sanitizer's
 * --error-exitcode would. */
int ocp_emu_num_findings(void);
/* Copies finding `index` into text; returns its length, or -1. */
int ocp_emu_finding(int index, char *text, size_t text_bytes);
/* Forgets the findings and the sticky errors of the devices. */
void ocp_emu_clear_findings(void);

/* The host alias of an emulated device address, for the twins of library calls; NULL when the range is not allocated.
 */
void *ocp_emu_host_pointer(uint64_t address, size_t bytes);
/* 1 when the address lies in the emulated devices' address space. */
int ocp_emu_owns(uint64_t address);

#endif
