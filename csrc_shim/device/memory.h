/* Device and pinned memory: the policy over arenas, CUDA's pools and the driver. */
#ifndef OCP_DEVICE_MEMORY_H
#define OCP_DEVICE_MEMORY_H

#include "base/error.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/pool.h"
#include "device/run_memory.h"
#include "device/stream.h"
#include "driver/driver.h"

/* Device memory, at least 256-byte aligned, never host readable; bytes == 0 gives a valid address of its own. The
 * memory may be used by work enqueued on `stream`, or by anybody at once when that is NULL. While a graph is captured
 * on the stream, only what needs no call of the driver is given; what a graph refers to must not be freed before it.
 *
 * Free is stream ordered. On a stream: all that used the memory is ordered before the stream's end; later work on the
 * stream can get it at once, other streams when that has finished. With NULL: any stream may have used it; a stream can
 * get it again once what is enqueued now on the other streams has finished. */
int ocp_device_alloc(ocp_device *device, size_t bytes, ocp_stream *stream, CUdeviceptr *address, ocp_error *error);
void ocp_device_free(ocp_device *device, CUdeviceptr address, ocp_stream *stream);
/* Memory of its own for what lives long and is only read, such as weights: past the arena, for anybody at once. Freed
 * by ocp_device_free. */
int ocp_device_reserve(ocp_device *device, size_t bytes, CUdeviceptr *address, ocp_error *error);

/* Gives memory that no enqueued work uses back to the driver, and the streams that nobody borrows. Returns the bytes of
 * both kinds of memory. */
int64_t ocp_device_trim(ocp_device *device);

/* Somebody who keeps device memory that he can do without, such as the slabs of instances that no Run is using. When
 * memory runs out, reclaim is called, on any thread that allocates and on none of whose behalf a lock of ours is held;
 * it frees what it can. Removing one waits for a call in progress. */
typedef struct ocp_reclaimer {
  struct ocp_reclaimer *next;
  void (*reclaim)(struct ocp_reclaimer *self);
} ocp_reclaimer;
void ocp_reclaimer_add(ocp_device *device, ocp_reclaimer *reclaimer);
void ocp_reclaimer_remove(ocp_device *device, ocp_reclaimer *reclaimer);

/* ---- pools ---- */

ocp_pool *ocp_pool_create(void);
/* On a small device regions stay small, so that what lies in one keeps little from being given back. */
void ocp_pool_set_device_bytes(ocp_pool *pool, size_t total_bytes);
void ocp_pool_destroy(ocp_pool *pool); /* of a pool that was never used */
/* The arena's options from now on; a lower limit takes nothing back. */
void ocp_pool_configure(ocp_pool *pool, int memory, const ocp_arena_config *config);

/* The two kinds of memory behind the functions above. free returns false for an address that is not handed out.
 * A known stream may be named, as in ocp_device_free. */
int ocp_pool_alloc(ocp_device *device, int memory, size_t bytes, ocp_stream *stream, uint64_t *address,
                   ocp_error *error);
bool ocp_pool_free(ocp_device *device, int memory, uint64_t address, ocp_stream *stream);
/* Memory of its own, past the arena: for what lives long. */
int ocp_pool_reserve(ocp_device *device, int memory, size_t bytes, uint64_t *address, ocp_error *error);
/* Gives what is unused back to the driver; the bytes. `keep`: a mempool keeps what its options say. */
int64_t ocp_pool_shrink(ocp_device *device, int memory, bool keep);
void ocp_pool_stats(ocp_device *device, int memory, ocp_memory_stats *stats);
/* The end of a Run: chunks whose work has finished are bound to no stream any more. */
void ocp_pool_run_ended(ocp_device *device);

/* What a tracked Run freed goes back to the device's memory; what it still holds is its owner's. */
void ocp_run_memory_release(ocp_run_memory *memory);

#endif
