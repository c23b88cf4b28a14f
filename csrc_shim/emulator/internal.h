/* What the parts of the emulated CUDA device share; nothing outside emu_*.c includes it.
 *
 * A device is one range of reserved addresses that host code cannot touch, and an alias of the same length at a
 * constant distance where kernels and copies find the bytes. Work arrives as emu_op values; a stream runs them at once
 * (inline) or keeps them until the program waits (adversarial), and a capture keeps them as the nodes of a graph. */
#ifndef OCP_EMULATOR_INTERNAL_H
#define OCP_EMULATOR_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/emulator.h"
#include "emulator/kernel.h"

#define EMU_MAX_DEVICES 8
#define EMU_MAX_THREADS 1024u
#define EMU_WARP 32u
#define EMU_MAX_WARPS (EMU_MAX_THREADS / EMU_WARP)
#define EMU_DEFAULT_SHARED (48u << 10)
#define EMU_MAX_SHARED (227u << 10)
#define EMU_GRANULE 256u /* alignment and unit of allocations, and of the missing-wait check */

/* Codes that callers of the table get but do not compare with. */
enum {
  EMU_ERROR_ILLEGAL_STATE = 401,
  EMU_ERROR_CAPTURE_MERGE = 902,
  EMU_ERROR_CAPTURE_UNJOINED = 904,
  EMU_ERROR_CAPTURED_EVENT = 907,
  EMU_ERROR_CAPTURE_WRONG_THREAD = 908,
};

/* ---- heap.c: an allocator over a range of addresses that it never touches ---- */
typedef struct emu_heap_block emu_heap_block;
#define EMU_HEAP_BINS 256
#define EMU_HEAP_LEVELS 6
typedef struct emu_heap {
  pthread_mutex_t lock;
  uint64_t base;     /* first address handed out */
  ptrdiff_t alias;   /* add it to an address to get the host pointer of its bytes */
  uint64_t bytes;    /* of addresses, a multiple of EMU_GRANULE */
  uint64_t capacity; /* that can be live at once */
  uint64_t used;     /* bytes of live blocks, rounded to granules */
  uint32_t redzone;  /* bytes kept unallocated after each block */
  emu_heap_block *blocks;
  uint64_t *starts[EMU_HEAP_LEVELS]; /* bitmap of the granules where a block starts, and its summaries */
  uint32_t levels;
  uint64_t bin_mask[EMU_HEAP_BINS / 64];
  uint32_t bins[EMU_HEAP_BINS];
  void *tables;
  size_t tables_bytes;
} emu_heap;
/* 0, or -1 when the tables cannot be mapped. The heap owns its tables, not the range. */
int emu_heap_init(emu_heap *heap, uint64_t base, ptrdiff_t alias, uint64_t bytes, uint64_t capacity, uint32_t redzone);
void emu_heap_destroy(emu_heap *heap);
uint64_t emu_heap_alloc(emu_heap *heap, uint64_t bytes); /* 0: no room */
bool emu_heap_free(emu_heap *heap, uint64_t address);    /* false: no live block starts there */
/* Whether [address, address + bytes) lies in one live block; its start and size, where wanted. */
bool emu_heap_find(emu_heap *heap, uint64_t address, uint64_t bytes, uint64_t *start, uint64_t *size);
/* What the live block that starts at the address takes: its size, rounded up, and its red zone. */
uint64_t emu_heap_held(emu_heap *heap, uint64_t address);
/* The live block that starts at the address or last before it, even when the address is beyond its end. */
bool emu_heap_around(emu_heap *heap, uint64_t address, uint64_t *start, uint64_t *size);
void emu_heap_visit(emu_heap *heap, void (*visit)(void *context, uint64_t address, uint64_t bytes), void *context);

/* ---- devices ---- */
typedef struct CUctx_st emu_device; /* a device and its primary context are one object */
typedef struct emu_clock emu_clock;
struct CUstream_st {
  emu_device *device;
  unsigned flags;
  pthread_mutex_t lock; /* inline: held while an operation runs */
  struct emu_item *head, *tail;
  bool destroyed; /* adversarial: released once its last operation has run */
  struct emu_capture *_Atomic capture;
  struct CUgraphNode_st **frontier; /* the capture's nodes that the next one of this stream depends on */
  uint32_t num_frontier;
  struct CUstream_st *previous, *next; /* all streams of a device */
  emu_clock *clock;                    /* checking mode */
};
struct CUctx_st {
  int ordinal;
  atomic_int retained;
  atomic_int error; /* sticky, as a CUDA context's */
  emu_heap heap;
  struct CUstream_st legacy; /* the null stream */
};
typedef struct emu_state {
  ocp_emu_config config;
  uint64_t base, bytes; /* the address space of all devices */
  uint64_t span;        /* of one device: more than its memory, so that fragments of it can be used as on a GPU */
  ptrdiff_t alias;
  emu_heap pinned; /* page-locked host memory; its addresses are host pointers */
  struct CUctx_st devices[EMU_MAX_DEVICES];
  uint32_t threads; /* that run blocks, the launching one included */
  atomic_int live;  /* allocations, streams, events, modules and graphs */
} emu_state;
extern emu_state emu;

static inline bool emu_is_device_address(uint64_t address) { return address - emu.base < emu.bytes; }
static inline bool emu_is_pinned_address(uint64_t address) { return address - emu.pinned.base < emu.pinned.bytes; }
static inline emu_device *emu_device_of(uint64_t address) { return &emu.devices[(address - emu.base) / emu.span]; }

/* Entry of every call: not after a fork, a context is current, and no sticky error. */
CUresult emu_enter(emu_device **device);
/* Entry and result of calls that give something back: they do so even after a sticky error, and then return it. */
CUresult emu_leave(void);
CUresult emu_lost(void);
CUresult emu_start(void); /* reserves the address space on the first call */
/* Keeps the message for emu_last_error and returns code. */
CUresult emu_fail(CUresult code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- loader.c, symbols.c ---- */
struct CUfunc_st {
  struct CUmod_st *module;
  void (*entry)(const void *const *params, ocp_emu_thread *thread);
  const ocp_emu_kernel_meta *meta;
  const char *name;
  uint32_t max_dynamic_shared;
  _Atomic uint32_t ticks_per_block; /* cost estimate that decides whether to wake workers; 0: not known yet */
  struct CUfunc_st *next;
};
/* Whether the range lies in the module's data. */
bool emu_module_owns(const struct CUmod_st *module, uint64_t address, uint64_t bytes);
/* Address of the function that a kernel object may call by that name, or NULL. */
const void *emu_symbol(const char *name);

/* ---- operations ---- */
typedef enum emu_op_kind { EMU_OP_KERNEL, EMU_OP_COPY, EMU_OP_SET, EMU_OP_REUSE, EMU_OP_FREE } emu_op_kind;
typedef struct emu_op {
  emu_op_kind kind;
  uint32_t num_params;
  union {
    struct {
      struct CUfunc_st *function;
      uint32_t grid[3], block[3];
      uint32_t dynamic_shared;
    } kernel;
    struct {
      uint64_t dst, src; /* device addresses, or host pointers as the direction says */
      uint64_t bytes;
      bool dst_host, src_host;
    } copy;
    struct {
      uint64_t dst;
      uint64_t bytes;
      unsigned char value;
    } set;
    struct { /* checking mode: see emu_reuse */
      uint64_t address;
      uint64_t bytes, held;
    } reuse;
    struct {
      uint64_t address; /* of a memory pool's block */
    } free;
  };
  uint64_t params[OCP_EMU_MAX_PARAMS]; /* only num_params of them are ever copied */
} emu_op;
static inline size_t emu_op_bytes(const emu_op *op) {
  return offsetof(emu_op, params) + op->num_params * sizeof(op->params[0]);
}
/* Checks a launch and makes it an operation. */
CUresult emu_make_launch(emu_op *op, CUfunction function, const unsigned grid[3], const unsigned block[3],
                         unsigned shared_bytes, void **params, void **extra);
/* Runs the operation to its end in the calling thread (and the workers). clock: of the operation, in checking mode. */
CUresult emu_run(emu_device *device, const emu_op *op, const emu_clock *clock);
/* Whether the range lies in one live allocation of a device; whether a copy of it holds the host up. */
bool emu_device_range(uint64_t address, uint64_t bytes);
bool emu_is_pageable(const void *pointer, uint64_t bytes);
CUresult emu_run_kernel(emu_device *device, const emu_op *op, const emu_clock *clock);

/* ---- launch.c, workers.c, fiber.c: a running launch ---- */
typedef struct emu_launch {
  const struct CUfunc_st *function;
  const void *const *params;
  uint32_t grid[3], block[3];
  uint32_t threads; /* of a block */
  uint32_t dynamic_shared;
  uint64_t blocks;
  emu_device *device;
  const emu_clock *clock;
  _Atomic int error;
  _Atomic unsigned found; /* kinds of findings */
} emu_launch;
/* What one host thread needs to run blocks; lent from a list for the time of a launch. */
typedef struct emu_cpu emu_cpu;
/* Calls run(context, first, last) over [0, count) in the calling thread and the workers; returns when all is done. */
typedef void (*emu_range_fn)(void *context, uint64_t first, uint64_t last);
void emu_pool_run(emu_range_fn run, void *context, uint64_t count, uint64_t chunk);
/* Around a launch: writes its time where the environment asks for it. */
uint64_t emu_profile_begin(void);
void emu_profile_end(uint64_t begun, const emu_launch *launch);

/* ---- check.c: the checking mode ---- */
/* The result of a launch that has run, with its finding as the text where it has one. */
CUresult emu_check_launched(emu_launch *launch);
/* Reports that some threads of the block wait for others that never come. */
void emu_check_divergence(emu_cpu *cpu);

/* ---- mempool.c ---- */
void emu_mempool_run_free(uint64_t address);
/* Somebody has waited for work of the device. */
void emu_mempools_synchronized(const emu_device *device);

/* ---- stream.c, graph.c ---- */
CUresult emu_enqueue(CUstream stream, const emu_op *op);
/* The stream of a handle: NULL and CU_STREAM_LEGACY are the device's null stream. */
static inline CUstream emu_stream_of(emu_device *device, CUstream stream) {
  return stream && stream != CU_STREAM_LEGACY ? stream : &device->legacy;
}
/* The error of a call that may wait for the device, such as an allocation, where a capture forbids it. */
CUresult emu_capture_unsafe(void);

#endif
