/* Configuration and reports of the emulated CUDA device. Everything else goes through the driver table. */
#ifndef OCP_EMULATOR_EMULATOR_H
#define OCP_EMULATOR_EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ocp_emu_config {
  uint32_t num_devices;  /* 1 .. 8 */
  uint32_t workers;      /* threads that run blocks; 0: one per core of the process's affinity mask */
  uint64_t device_bytes; /* memory of each device; address space only until it is touched */
  uint32_t adversarial;  /* 0: inline streams; 1: deferred and interleaved by `seed` until somebody waits */
  uint32_t check;        /* 1: the checking mode; needs kernels compiled with checks */
  uint64_t seed;
} ocp_emu_config;

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
/* What the last call of this thread failed for, in words: the symbol that a kernel object misses, the range that a copy
 * left. Empty where the code says it all. */
const char *ocp_emu_last_error(void);
/* Copies finding `index` into text; returns its length, or -1. */
int ocp_emu_finding(int index, char *text, size_t text_bytes);
/* Forgets the findings and the sticky errors of the devices. */
void ocp_emu_clear_findings(void);

/* Tells the checking mode that an allocator of ours gives `held` bytes of its memory a new use of `bytes` bytes: what
 * was written before no longer counts, and what is beyond them is not allocated. Happens in the order of the stream (a
 * CUstream), or at once for NULL. Whether something was enqueued there. */
bool ocp_emu_reuse(uint64_t address, size_t bytes, size_t held, void *stream);
/* Bytes that such an allocator leaves unused after each use, so that overruns are seen; 0 without the checking mode. */
size_t ocp_emu_redzone(void);

/* The host alias of an emulated device address, for the twins of library calls; NULL when the range is not allocated.
 */
void *ocp_emu_host_pointer(uint64_t address, size_t bytes);
/* 1 when the address lies in the emulated devices' address space. */
int ocp_emu_owns(uint64_t address);

#endif
