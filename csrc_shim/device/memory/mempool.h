/* Allocates device memory from a CUDA memory pool (cuMemAllocFromPoolAsync) instead of the arena. Private to memory.c.
 * The lock of an ocp_mempool is taken before streams_lock and the lock of the ocp_pool (pool.h). */
#ifndef OCP_DEVICE_MEMORY_MEMPOOL_H
#define OCP_DEVICE_MEMORY_MEMPOOL_H

#include "base/error.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/pool.h"
#include "device/stream.h"
#include "driver/driver.h"

ocp_mempool *ocp_mempool_create(void);          /* NULL: out of host memory */
void ocp_mempool_destroy(ocp_mempool *mempool); /* only for a mempool that was never used */
void ocp_mempool_configure(ocp_mempool *mempool, const ocp_arena_config *config);
bool ocp_mempool_is_wanted(const ocp_mempool *mempool);

/* Allocates `size` bytes (rounded); the device's context is current. Fills `error` unless it returns CUDA_SUCCESS. */
CUresult ocp_mempool_alloc(ocp_device *device, size_t size, ocp_stream *stream, uint64_t *address, ocp_error *error);
/* Frees the allocation; *size: its size in bytes. Returns false if no allocation starts at the address. */
bool ocp_mempool_free(ocp_device *device, uint64_t address, ocp_stream *stream, size_t *size);
/* Frees the blocks that could not be freed earlier, as far as this is possible now. */
void ocp_mempool_collect(ocp_device *device);
/* Releases unused memory to the driver; the result is the number of bytes released. `keep`: the pool retains the number
 * of bytes that its options set; else it retains none. */
int64_t ocp_mempool_shrink(ocp_device *device, bool keep);
/* Returns the number of bytes that the pool holds from the driver. The arena counts the bytes that are handed out. */
int64_t ocp_mempool_held_bytes(ocp_device *device);

#endif
