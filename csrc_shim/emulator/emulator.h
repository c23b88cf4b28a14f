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

/* ---- the counting mode ---- */

/* Bits of ocp_emu_access.what above those of the access's bytes. */
enum {
  OCP_EMU_COUNT_STORE = 1 << 16,
  OCP_EMU_COUNT_ATOMIC = 1 << 17,
  OCP_EMU_COUNT_GLOBAL = 1 << 18, /* address is the device's */
  OCP_EMU_COUNT_SHARED = 1 << 19  /* address counts from the block's shared memory */
};

/* One access of one thread. Threads of a warp access together at the same place in the same turn. */
typedef struct ocp_emu_access {
  uint64_t address;
  uint32_t what;
  uint32_t turn;  /* how often the thread had been at the place */
  uint32_t block; /* by its number in ocp_emu_count.blocks */
  uint16_t thread;
  uint16_t place;
} ocp_emu_access;

/* What launches of kernels compiled for counting are to do, and what they did. All memory is the caller's. */
typedef struct ocp_emu_count {
  const uint64_t *blocks; /* the only ones of a launch that run, one after the other */
  uint32_t num_blocks;
  uint32_t num_places; /* of the kernel: places of accesses, and parts without branches */
  uint32_t max_turns;  /* of a thread at a place that are noted */
  uint32_t block;      /* that runs */
  uint32_t num_left;   /* blocks that ended where they would have accessed no memory of the device */
  uint64_t max_accesses, num_accesses;
  ocp_emu_access *accesses;
  uint64_t *executed; /* how often threads were at each place */
  uint64_t *issued;   /* how often warps were: as often as the lane of theirs that was there most */
  uint32_t *turns;    /* num_places * 1024 */
} ocp_emu_count;

/* Until it is called again, launches of the process do what count says; NULL: they run as ever. Only one thread may
 * launch meanwhile. */
void ocp_emu_count_launches(ocp_emu_count *count);

/* The host alias of an emulated device address, for the twins of library calls; NULL when the range is not allocated.
 */
void *ocp_emu_host_pointer(uint64_t address, size_t bytes);
/* 1 when the address lies in the emulated devices' address space. */
int ocp_emu_owns(uint64_t address);

#endif
