/* Operations: kernel launches, copies, memsets and frees. Streams run them, and nodes of graphs contain them. */
#ifndef OCP_EMULATOR_OP_H
#define OCP_EMULATOR_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/kernel.h"

typedef enum emu_op_kind { EMU_OP_KERNEL, EMU_OP_COPY, EMU_OP_SET, EMU_OP_REUSE, EMU_OP_FREE } emu_op_kind;
typedef struct emu_op {
  emu_op_kind kind;
  uint32_t num_params;
  uint64_t source; /* source of the work in profiles: driver/activity.h */
  union {
    struct {
      struct CUfunc_st *function;
      uint32_t grid[3], block[3];
      uint32_t dynamic_shared;
    } kernel;
    struct {
      uint64_t dst, src; /* device addresses, or host pointers if dst_host or src_host is true */
      uint64_t bytes;
      bool dst_host, src_host;
    } copy;
    struct {
      uint64_t dst;
      uint64_t bytes;
      unsigned char value;
    } set;
    struct { /* checking mode: ReuseMemory (driver/driver.h) */
      uint64_t address;
      uint64_t bytes, held;
    } reuse;
    struct {
      uint64_t address; /* start of a block of a memory pool */
    } free;
  };
  uint64_t params[]; /* num_params of them */
} emu_op;
/* Room for an operation with the parameters of any kernel. */
typedef union emu_any_op {
  emu_op op;
  char room[sizeof(emu_op) + OCP_EMU_MAX_PARAMS * sizeof(uint64_t)];
} emu_any_op;
static inline size_t emu_op_bytes(const emu_op *op) {
  return offsetof(emu_op, params) + op->num_params * sizeof(op->params[0]);
}

/* Checks the parameters of a launch and makes *op the operation that runs it. */
CUresult emu_make_launch(emu_op *op, CUfunction function, const unsigned grid[3], const unsigned block[3],
                         unsigned shared_bytes, void **params, void **extra);

#endif
