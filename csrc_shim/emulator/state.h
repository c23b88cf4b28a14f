/* The state of the emulated CUDA devices, and the checks at the start of each driver call.
 *
 * The memory of a device is a range of reserved addresses that host code cannot access, and an alias: a mapping of the
 * same length at a constant distance, through which kernels and copies access the bytes. Driver calls turn work into
 * emu_op values (op.h). A stream runs them at once (inline mode) or queues them until the program waits (adversarial
 * mode); a capture stores them as nodes of a graph.
 *
 *     call of the table -> emu_enter -> emu_op -+-> inline: runs now, under the stream's lock; behind an unfinished
 *                                               |   wait for an external semaphore: the stream's queue
 *                                               +-> adversarial: the stream's queue; runs when the program waits
 *                                               +-> captured: a node of a graph, whose launch is enqueued in turn
 *
 * Invariants:
 * - An invalid call returns the code that CUDA's driver returns for it.
 * - Host code reaches device memory through the alias only, so that a use of a device address on the host faults.
 * - Locks are taken in this order: the list of streams, a stream's, emu_order, a heap's.
 * - After a sticky error of a device, emu_enter fails with that error, and so do the calls on the device; calls that
 *   release something still do so. */
#ifndef OCP_EMULATOR_STATE_H
#define OCP_EMULATOR_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/config.h"
#include "emulator/heap.h"

#define EMU_MAX_DEVICES 8
#define EMU_MAX_THREADS 1024u
#define EMU_WARP 32u
#define EMU_MAX_WARPS (EMU_MAX_THREADS / EMU_WARP)
#define EMU_DEFAULT_SHARED (48u << 10)
#define EMU_MAX_SHARED (227u << 10)

/* CUDA error codes that the emulator returns and that driver.h lacks, because the plugin does not test for them. */
enum {
  EMU_ERROR_ILLEGAL_STATE = 401,
  EMU_ERROR_CAPTURE_MERGE = 902,
  EMU_ERROR_CAPTURE_UNJOINED = 904,
  EMU_ERROR_CAPTURED_EVENT = 907,
  EMU_ERROR_CAPTURE_WRONG_THREAD = 908,
};

typedef struct CUctx_st emu_device; /* a device and its primary context are one object */
struct CUstream_st {
  emu_device *device;
  unsigned flags;
  pthread_mutex_t lock; /* inline mode: held while an operation runs in the call that enqueues it */
  struct emu_item *head, *tail;
  bool destroyed; /* true: freed after its last queued operation has run (emu_queue_sweep) */
  struct emu_capture *_Atomic capture;
  struct CUgraphNode_st **frontier; /* the captured nodes on which the next node of this stream depends */
  uint32_t num_frontier;
  struct CUstream_st *previous, *next; /* in emu_streams (work/stream_list.h) */
  struct emu_clock *clock;             /* checking mode */
};
struct CUctx_st {
  int ordinal;
  atomic_int retained;
  atomic_uint peers;   /* bit i: the context may access the memory of device i */
  atomic_int error;    /* sticky, as a CUDA context's */
  char lost_text[256]; /* why emu_lose_device set the error; "": something else set it */
  emu_heap heap;
  struct CUstream_st legacy; /* the null stream */
};
typedef struct emu_state {
  ocp_emu_config config;
  uint64_t base, bytes; /* the address space of all devices */
  uint64_t span; /* address space of one device: more than its memory, so that fragmentation wastes no memory, as on a
                    GPU with virtual memory */
  ptrdiff_t alias;
  emu_heap pinned; /* page-locked host memory; its addresses are host pointers */
  struct CUctx_st devices[EMU_MAX_DEVICES];
  uint32_t threads;            /* host threads that run blocks, the launching one included */
  atomic_int live;             /* allocations, memory pools, streams, events, modules and graphs */
  atomic_bool started, forked; /* the address space is reserved; this process is a forked child */
} emu_state;
extern emu_state emu;

static inline bool emu_is_device_address(uint64_t address) { return address - emu.base < emu.bytes; }
static inline bool emu_is_pinned_address(uint64_t address) { return address - emu.pinned.base < emu.pinned.bytes; }
static inline emu_device *emu_device_of(uint64_t address) { return &emu.devices[(address - emu.base) / emu.span]; }

/* Makes the checks at the start of most driver calls: fails before Init, after a fork, without a current context, and
 * after a sticky error. *device: the current device. */
CUresult emu_enter(emu_device **device);
/* For driver calls that release something: they do so even after a sticky error, and then return that error. emu_leave
 * makes the checks at their start; emu_lost returns the sticky error, or CUDA_SUCCESS, for their end. */
CUresult emu_leave(void);
CUresult emu_lost(void);
/* Returns the device's sticky error, or CUDA_SUCCESS; stores its reason for emu_last_error, if one is known. */
CUresult emu_error_of(const emu_device *device);
/* Makes `code` the device's sticky error, for a reason that no operation has reported, unless the device has a sticky
 * error already. The caller holds emu_order (work/queue.h). */
void emu_lose_device(emu_device *device, CUresult code, const char *format, ...) __attribute__((format(printf, 3, 4)));
void emu_recover(emu_device *device); /* clears the sticky error */
/* Returns the seconds after which a stream's wait for an external semaphore makes its device lost. */
#define EMU_SEMAPHORE_VARIABLE "ORT_CUDA_PLUGIN_EMULATE_SEMAPHORE_SECONDS"
uint32_t emu_semaphore_seconds(void);
/* Stores the message for emu_last_error and returns `code`. */
CUresult emu_fail(CUresult code, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

/* Members of the driver table. */
CUresult emu_ctx_set_current(CUcontext context);
CUresult emu_ctx_get_current(CUcontext *context);
const char *emu_last_error(void);

#endif
