/* Contract between kernels compiled for the emulated device and the emulator that runs them.
 *
 * A kernel image is a relocatable ELF object for the host's CPU (static relocations, large code model) made by the
 * compile pipeline from the LLVM IR that the GPU build hands to NVVM. For a kernel NAME it defines two symbols:
 *
 * - NAME, a function `void NAME(const void *const *params, ocp_emu_thread *thread)`. params[i] points to the value of
 *   parameter i, as kernelParams of cuLaunchKernel does; the emulator has already translated pointers from device
 *   addresses to the alias that host code can read.
 * - NAME.meta, a constant ocp_emu_kernel_meta.
 *
 * A kernel has mode OCP_EMU_BLOCK if it has no barriers and no warp operations (such as shuffles, votes and mma), and,
 * if it was translated from PTX, calls none of the ocp_emu_* functions that take the thread. One call then runs every
 * thread of the block. The loop over the threads is in the object, where LLVM can vectorize it; only in kernels
 * compiled for the checking or the counting mode does the loop set thread->tid, for reports and records of accesses.
 * Other kernels have mode OCP_EMU_FIBER: one call runs one thread, and barriers and warp operations switch fibers.
 *
 * Undefined symbols are resolved against the table in calls/symbols.c: the ocp_emu_* functions of blocks/fiber.h,
 * warp.h, check.h, order.h, global_order.h and count.h and of calls/device_functions.h, libm, memcpy and the like. For
 * any other symbol ModuleLoadData fails, and the error names the symbol. */
#ifndef OCP_EMULATOR_KERNEL_H
#define OCP_EMULATOR_KERNEL_H

#include <stdint.h>

#define OCP_EMU_META_VERSION 1u
#define OCP_EMU_MAX_PARAMS 64

enum { OCP_EMU_BLOCK = 0, OCP_EMU_FIBER = 1 };
/* Kind of a parameter that is a global pointer, which the emulator translates. Other parameters are plain values; their
 * kind is their size, 1, 2, 4 or 8 bytes. */
enum { OCP_EMU_PARAM_POINTER = 0x80 };

typedef struct ocp_emu_kernel_meta {
  uint32_t version;                   /* OCP_EMU_META_VERSION */
  uint32_t mode;                      /* OCP_EMU_BLOCK or OCP_EMU_FIBER */
  uint32_t static_shared_bytes;       /* static shared memory of a block */
  uint32_t stack_bytes;               /* stack that one thread needs at most; 0 when unknown */
  uint32_t checked;                   /* 1 when loads and stores call ocp_emu_check_* */
  uint32_t num_params;                /* at most OCP_EMU_MAX_PARAMS */
  uint8_t params[OCP_EMU_MAX_PARAMS]; /* OCP_EMU_PARAM_POINTER, or the size of the value in bytes */
} ocp_emu_kernel_meta;

/* Special registers of a thread; the offsets are part of the contract with the compile pipeline. */
typedef struct ocp_emu_thread {
  uint32_t tid[3];         /*  0: threadIdx */
  uint32_t ntid[3];        /* 12: blockDim */
  uint32_t ctaid[3];       /* 24: blockIdx */
  uint32_t nctaid[3];      /* 36: gridDim */
  uint32_t laneid;         /* 48 */
  uint32_t dynamic_shared; /* 52: bytes of dynamic shared memory */
  uint8_t *shared; /* 56: shared memory of the block: static part first, 16-byte aligned, then the dynamic part */
  void *scheduler; /* 64: private to the emulator */
} ocp_emu_thread;

#endif
