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

/* Allocate and free device memory: at least 256-byte aligned, not readable by the host; 0 bytes also give an address of
 * their own. Work enqueued on `stream` may use the memory (NULL: work on any stream). While the stream is being
 * captured, an allocation succeeds only if it needs no driver call, unless the capture is the application's
 * (run_memory.h). Free memory that a CUDA graph refers to only after destroying the graph.
 *
 * Freeing is stream ordered. With a stream, all work that used the memory must precede the work that the stream
 * enqueues from now on: the same stream can get the memory again at once, other streams when the earlier work has
 * finished. With NULL, any stream may have used the memory: a stream can get it again when the work that other streams
 * have enqueued by now has finished. */
int ocp_device_alloc(ocp_device *device, size_t bytes, ocp_stream *stream, CUdeviceptr *address, ocp_error *error);
void ocp_device_free(ocp_device *device, CUdeviceptr address, ocp_stream *stream);
/* Allocates memory from the driver, bypassing the arena, for long-lived data that is only read, such as weights. Work
 * on any stream may use it. Free it by ocp_device_free. */
int ocp_device_reserve(ocp_device *device, size_t bytes, CUdeviceptr *address, ocp_error *error);

/* From now on fills each allocation of device memory with this byte before it is handed out (-1: stops filling). A
 * result that no kernel has written then differs from the data that earlier work left in the memory; the selftest
 * relies on this. An allocation on a capturing stream is not filled, since the fill would be a node of the graph; nor
 * is memory that a watched Run frees and allocates again (run_memory.h). */
void ocp_device_fill_new_memory(ocp_device *device, int byte);

/* Calls the reclaimers, destroys the idle streams of the pool, and releases to the driver the memory that no enqueued
 * work uses. The result is the number of bytes of device and pinned memory released. */
int64_t ocp_device_trim(ocp_device *device);
/* Like ocp_device_trim, but the mempool retains the number of bytes that its options set. */
int64_t ocp_device_shrink(ocp_device *device);

/* Determines the available device memory: the driver's free bytes plus the unused bytes of the arena, at most what the
 * arena's limit allows. */
int ocp_device_available(ocp_device *device, uint64_t *bytes, ocp_error *error);

/* A callback that frees optional device memory, such as the slabs of CUDA graphs that no Run of a cluster uses. When
 * memory runs out, the allocating thread calls `reclaim`, and holds none of the plugin's locks except the pool's
 * reclaim_lock. Removing a reclaimer waits for a call in progress. */
typedef struct ocp_reclaimer {
  struct ocp_reclaimer *next;
  void (*reclaim)(struct ocp_reclaimer *self);
} ocp_reclaimer;
void ocp_reclaimer_add(ocp_device *device, ocp_reclaimer *reclaimer);
void ocp_reclaimer_remove(ocp_device *device, ocp_reclaimer *reclaimer);

/* ---- pools ---- */

ocp_pool *ocp_pool_create(void);
/* Limits the growth of regions to a sixteenth of the device's memory, because a region goes back to the driver only
 * when none of its chunks is in use. */
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
/* Called at the end of a Run: frees the bound chunks whose work has finished, and the blocks of the mempool that could
 * not be freed earlier. */
void ocp_pool_run_ended(ocp_device *device);

/* Frees the recorded blocks (run_memory.h) that the Run had freed; blocks still in use stay with their owners. Forgets
 * all records. */
void ocp_run_memory_release(ocp_run_memory *memory);

#endif
