/* Allocates and frees device and pinned memory, from the arenas, CUDA's memory pools or the driver. */
#ifndef OCP_DEVICE_MEMORY_MEMORY_H
#define OCP_DEVICE_MEMORY_MEMORY_H

#include "base/error.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/pool.h"
#include "device/run_memory.h"
#include "device/stream.h"
#include "driver/driver.h"

/* Device memory, at least 256-byte aligned, never host readable; bytes == 0 gives a valid, separate address.
 * Work enqueued on `stream` may use the memory; if that is NULL, all work may. While a graph is captured on the stream,
 * an allocation succeeds only if it needs no call of the driver. Free what a graph refers to only after the graph.
 *
 * Free is stream ordered. On a stream: all work that used the memory comes before the stream's end. Later work on the
 * stream can get the memory at once, other streams when that work has finished. With NULL: any stream may have used it.
 * A stream can get it again once the work that is enqueued now on the other streams has finished. */
int ocp_device_alloc(ocp_device *device, size_t bytes, ocp_stream *stream, CUdeviceptr *address, ocp_error *error);
void ocp_device_free(ocp_device *device, CUdeviceptr address, ocp_stream *stream);
/* Allocates memory of the driver, not of the arena, for long-lived data that is only read, such as weights. All work
 * may use the memory. Free it by ocp_device_free. */
int ocp_device_reserve(ocp_device *device, size_t bytes, CUdeviceptr *address, ocp_error *error);

/* Calls the reclaimers, destroys the idle streams of the pool, and releases to the driver the memory that no enqueued
 * work uses. The result is the number of bytes of device and pinned memory released. */
int64_t ocp_device_trim(ocp_device *device);
/* Like ocp_device_trim, but the mempool retains the number of bytes that its options set. */
int64_t ocp_device_shrink(ocp_device *device);

/* Determines the available device memory: the bytes that the driver has free and those that the arena holds idle, up to
 * the arena's limit. */
int ocp_device_available(ocp_device *device, uint64_t *bytes, ocp_error *error);

/* An owner of device memory that it can release, such as a cluster with CUDA graphs that no Run uses. When memory runs
 * out, an allocating thread that holds none of our locks calls `reclaim`, which frees what it can. Removing a reclaimer
 * waits for a call in progress. */
typedef struct ocp_reclaimer {
  struct ocp_reclaimer *next;
  void (*reclaim)(struct ocp_reclaimer *self);
} ocp_reclaimer;
void ocp_reclaimer_add(ocp_device *device, ocp_reclaimer *reclaimer);
void ocp_reclaimer_remove(ocp_device *device, ocp_reclaimer *reclaimer);

/* ---- pools ---- */

ocp_pool *ocp_pool_create(void);
/* Limits the size of regions on a small device: a region with one chunk in use cannot go back to the driver. */
void ocp_pool_set_device_bytes(ocp_pool *pool, size_t total_bytes);
void ocp_pool_destroy(ocp_pool *pool); /* only for a pool that was never used */
/* Sets the arena's options from now on. A lower limit frees nothing. */
void ocp_pool_configure(ocp_pool *pool, int memory, const ocp_arena_config *config);

/* Like ocp_device_alloc and ocp_device_free, for device or pinned memory (`memory`). ocp_pool_free returns false for an
 * address that is not handed out. */
int ocp_pool_alloc(ocp_device *device, int memory, size_t bytes, ocp_stream *stream, uint64_t *address,
                   ocp_error *error);
bool ocp_pool_free(ocp_device *device, int memory, uint64_t address, ocp_stream *stream);
/* Like ocp_device_reserve, for device or pinned memory. */
int ocp_pool_reserve(ocp_device *device, int memory, size_t bytes, uint64_t *address, ocp_error *error);
/* Releases unused memory to the driver; the result is the number of bytes released. `keep`: the mempool retains the
 * number of bytes that its options set; else it retains none. */
int64_t ocp_pool_shrink(ocp_device *device, int memory, bool keep);
void ocp_pool_stats(ocp_device *device, int memory, ocp_memory_stats *stats);
/* Called at the end of a Run: frees the bound chunks whose work has finished. */
void ocp_pool_run_ended(ocp_device *device);

/* Gives the arena the allocations that a watched Run had freed. Those still in use stay with their owners. */
void ocp_run_memory_release(ocp_run_memory *memory);

#endif
