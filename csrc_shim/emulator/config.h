/* Configuration of the emulated CUDA devices, and requests of their counting mode; Python fills them. Types only. */
#ifndef OCP_EMULATOR_CONFIG_H
#define OCP_EMULATOR_CONFIG_H

#include <stdint.h>

enum { OCP_EMU_FAULT_BYTES = 256 }; /* maximum length of ocp_emu_config.faults, with its final 0 */

typedef struct ocp_emu_config {
  uint32_t num_devices;  /* 1 .. 8 */
  uint32_t workers;      /* host threads that run blocks; 0: one per core of the process's affinity mask */
  uint64_t device_bytes; /* memory of each device; it takes host memory only once it is accessed */
  uint32_t adversarial;  /* 0: inline streams; 1: work is deferred until the program waits, in an order from `seed` */
  uint32_t check;        /* 1: the checking mode; needs kernels compiled with checks */
  uint32_t slow_milliseconds; /* time after which a running launch is reported and SIGINT ends it; 0: 10 seconds */
  uint32_t semaphore_seconds; /* longest wait of a stream for an external semaphore, then its device is lost; 0: 60 */
  uint64_t seed;
  char faults[OCP_EMU_FAULT_BYTES]; /* faults of the devices: emulator/fault.h; "": no faults */
} ocp_emu_config;

/* ---- the counting mode ---- */

/* Flags of ocp_emu_access.what, whose low 16 bits are the number of bytes accessed. */
enum {
  OCP_EMU_COUNT_STORE = 1 << 16,
  OCP_EMU_COUNT_ATOMIC = 1 << 17,
  OCP_EMU_COUNT_GLOBAL = 1 << 18, /* `address` is a device address */
  OCP_EMU_COUNT_SHARED = 1 << 19  /* `address` is an offset in the block's shared memory */
};

/* One access of one thread. Lanes of a warp access memory together if the instruction and `turn` are equal. */
typedef struct ocp_emu_access {
  uint64_t address;
  uint32_t what;
  uint32_t turn;  /* number of times that the thread has executed the instruction before */
  uint32_t block; /* the block's index in ocp_emu_count.blocks */
  uint16_t thread;
  uint16_t place; /* number of the instruction */
} ocp_emu_access;

/* A request of the counting mode, and its results. The kernels must be compiled for that mode. The caller owns the
 * arrays. */
typedef struct ocp_emu_count {
  const uint64_t *blocks; /* the blocks of a launch that run, one after the other */
  uint32_t num_blocks;
  uint32_t num_places; /* instructions that access memory plus basic blocks of the kernel */
  uint32_t max_turns;  /* recorded executions per thread and instruction; later ones are not recorded */
  uint32_t block;      /* index of the running block */
  uint32_t num_left;   /* blocks that ended early, at an access to an invalid address */
  uint64_t max_accesses, num_accesses;
  ocp_emu_access *accesses;
  uint64_t *executed; /* executions of each instruction or basic block, summed over threads */
  uint64_t *issued;   /* the same per warp: the maximum over the warp's lanes, summed over warps */
  uint32_t *turns;    /* executions by each thread of the running block, 1024 entries per instruction or basic block */
} ocp_emu_count;

#endif
