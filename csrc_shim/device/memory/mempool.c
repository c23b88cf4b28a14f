#include "device/memory/mempool.h"

#include <stdlib.h>

#include "device/memory/arena.h"
#include "device/memory/chunk_table.h"
#include "device/order.h"
#include "device/release.h"

struct ocp_mempool {
  pthread_mutex_t lock; /* unlike the pool's lock, held during driver calls */
  atomic_bool wanted;
  int64_t keep_bytes;
  uint64_t release_threshold;
  CUmemoryPool handle; /* NULL: the pool does not exist */
  CUstream frees; /* stream for freeing blocks that no stream uses any more; created and destroyed with the pool. The
                     legacy default stream would wait for blocking streams of the application, and CUDA forbids its use
                     while such a stream is being captured. */
  ocp_chunk_table table;
  ocp_chunk *waiting; /* blocks whose free was deferred, mostly because several streams may use them; linked by older */
  atomic_bool has_waiting;
};

ocp_mempool *ocp_mempool_create(void) {
  ocp_mempool *mempool = calloc(1, sizeof *mempool);
  if (mempool)
    pthread_mutex_init(&mempool->lock, NULL);
  return mempool;
}

void ocp_mempool_destroy(ocp_mempool *mempool) { free(mempool); }

void ocp_mempool_configure(ocp_mempool *mempool, const ocp_arena_config *config) {
  pthread_mutex_lock(&mempool->lock);
  mempool->keep_bytes = config->cuda_mempool_bytes_to_keep_on_shrink;
  mempool->release_threshold = (uint64_t)config->cuda_mempool_release_threshold;
  pthread_mutex_unlock(&mempool->lock);
  atomic_store(&mempool->wanted, config->use_cuda_mempool != 0);
}

bool ocp_mempool_is_wanted(const ocp_mempool *mempool) {
  return atomic_load_explicit(&mempool->wanted, memory_order_relaxed);
}

/* ---- the driver's memory pool ---- */

/* Returns the driver's result, and fills the error unless the result is CUDA_SUCCESS. */
static CUresult check(ocp_device *device, CUresult result, const char *what, ocp_error *error) {
  if (result != CUDA_SUCCESS)
    ocp_device_fail(device, result, what, error);
  return result;
}

static CUresult open_pool(ocp_mempool *mempool, ocp_device *device, ocp_error *error) {
  const ocp_driver *driver = device->driver;
  if (mempool->handle)
    return CUDA_SUCCESS;
  const CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, device->device}};
  CUmemoryPool handle = NULL;
  CUresult result = check(device, driver->MemPoolCreate(&handle, &props), "cuMemPoolCreate", error);
  if (result != CUDA_SUCCESS)
    return result;
  result = driver->MemPoolSetAttribute(handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &mempool->release_threshold);
  if (check(device, result, "cuMemPoolSetAttribute", error) == CUDA_SUCCESS)
    result = check(device, driver->StreamCreate(&mempool->frees, CU_STREAM_NON_BLOCKING), "cuStreamCreate", error);
  if (result == CUDA_SUCCESS)
    mempool->handle = handle;
  else
    ocp_device_released(device, driver->MemPoolDestroy(handle), "cuMemPoolDestroy");
  return result;
}

static void close_pool(ocp_mempool *mempool, ocp_device *device) {
  const ocp_driver *driver = device->driver;
  ocp_device_released(device, driver->StreamDestroy(mempool->frees), "cuStreamDestroy");
  ocp_device_released(device, driver->MemPoolDestroy(mempool->handle), "cuMemPoolDestroy");
  mempool->handle = NULL;
}

static int64_t reserved_bytes(const ocp_mempool *mempool, const ocp_device *device) {
  uint64_t bytes = 0;
  if (mempool->handle)
    device->driver->MemPoolGetAttribute(mempool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes);
  return (int64_t)bytes;
}

/* ---- freeing ---- */

/* Frees the block in the order of the stream. Returns false if the driver cannot free it now because it is out of
 * memory or a capture forbids the call. After any other error the block counts as allocated for good and is not freed
 * again. */
static bool driver_free(ocp_device *device, const ocp_chunk *chunk, CUstream stream) {
  ocp_pool *pool = device->pool;
  const CUresult result = device->driver->MemFreeAsync(chunk->address, stream);
  const ocp_freed freed =
      result == CUDA_ERROR_OUT_OF_MEMORY ? OCP_FREE_LATER : ocp_device_freed(device, result, "cuMemFreeAsync");
  if (freed == OCP_FREED) {
    pthread_mutex_lock(&pool->lock);
    ocp_arena_pooled_freed(pool->arenas[OCP_DEVICE_MEMORY], chunk->size);
    pthread_mutex_unlock(&pool->lock);
  }
  return freed != OCP_FREE_LATER;
}

/* Frees the block in the order of the only busy stream that may have used it, or at once if no such stream is busy.
 * Returns false if several are busy, if the busy one is being captured, or if the driver cannot free it now. */
static bool free_in_order(ocp_device *device, const ocp_chunk *chunk) {
  ocp_pool *pool = device->pool;
  ocp_stream *busy = NULL;
  int num_busy = 0;
  pthread_mutex_lock(&pool->streams_lock); /* keeps `busy` from being destroyed */
  pthread_mutex_lock(&pool->lock);
  for (ocp_stream *stream = pool->streams; stream; stream = stream->priv->next)
    if (!ocp_pool_is_finished(pool, stream->priv->id, chunk->freed_at, NULL)) {
      busy = stream;
      num_busy++;
    }
  pthread_mutex_unlock(&pool->lock);
  const bool can = num_busy == 0 || (num_busy == 1 && !atomic_load(&busy->capturing));
  const bool freed = can && driver_free(device, chunk, busy ? busy->handle : pool->mempool->frees);
  pthread_mutex_unlock(&pool->streams_lock);
  return freed;
}

static void collect(ocp_device *device, ocp_mempool *mempool) {
  for (ocp_chunk **link = &mempool->waiting, *chunk; (chunk = *link);) {
    if (!free_in_order(device, chunk)) {
      link = &chunk->older;
      continue;
    }
    *link = chunk->older;
    free(chunk);
  }
  atomic_store_explicit(&mempool->has_waiting, mempool->waiting != NULL, memory_order_relaxed);
}

void ocp_mempool_collect(ocp_device *device) {
  ocp_mempool *mempool = device->pool->mempool;
  if (!atomic_load_explicit(&mempool->has_waiting, memory_order_relaxed))
    return;
  pthread_mutex_lock(&mempool->lock);
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (stay.entered)
    collect(device, mempool);
  pthread_mutex_unlock(&mempool->lock);
}

bool ocp_mempool_free(ocp_device *device, uint64_t address, ocp_stream *stream, size_t *size) {
  ocp_pool *pool = device->pool;
  ocp_mempool *mempool = pool->mempool;
  pthread_mutex_lock(&mempool->lock);
  ocp_chunk *chunk = ocp_chunk_table_find(&mempool->table, address);
  if (chunk) {
    ocp_chunk_table_erase(&mempool->table, chunk);
    *size = chunk->size;
    pthread_mutex_lock(&pool->lock);
    ocp_arena_pooled_given_back(pool->arenas[OCP_DEVICE_MEMORY], chunk->size);
    if (stream)
      ocp_pool_advance(pool, stream);
    chunk->freed_at = stream ? pool->sequence : ++pool->sequence;
    pthread_mutex_unlock(&pool->lock);
    OCP_STAY stay = ocp_device_enter_to_release(device);
    if (stay.entered && stream && !atomic_load(&stream->capturing) && driver_free(device, chunk, stream->handle)) {
      free(chunk);
    } else {
      chunk->older = mempool->waiting;
      mempool->waiting = chunk;
      atomic_store_explicit(&mempool->has_waiting, true, memory_order_relaxed);
      if (stay.entered)
        collect(device, mempool);
    }
  }
  pthread_mutex_unlock(&mempool->lock);
  return chunk != NULL;
}

/* ---- allocation ---- */

/* The functions below return a CUresult of the driver, and fill the error unless it is CUDA_SUCCESS. */

static CUresult driver_alloc(ocp_device *device, const ocp_mempool *mempool, size_t size, CUstream stream,
                             uint64_t *address, ocp_error *error) {
  return check(device, device->driver->MemAllocFromPoolAsync(address, size, mempool->handle, stream),
               "cuMemAllocFromPoolAsync", error);
}

/* Allocates memory that any stream may use: waits until the allocating stream has executed the allocation. */
static CUresult driver_alloc_at_once(ocp_device *device, const ocp_mempool *mempool, size_t size, uint64_t *address,
                                     ocp_error *error) {
  ocp_stream *stream;
  if (ocp_stream_borrow(device, &stream, error) != ORT_OK)
    return CUDA_ERROR_UNKNOWN;
  CUresult result = driver_alloc(device, mempool, size, stream->handle, address, error);
  if (result == CUDA_SUCCESS) {
    result = check(device, device->driver->StreamSynchronize(stream->handle), "cuStreamSynchronize", error);
    if (result != CUDA_SUCCESS) {
      ocp_device_freed(device, device->driver->MemFreeAsync(*address, stream->handle), "cuMemFreeAsync");
      *address = 0;
    }
  }
  ocp_stream_return(stream);
  return result;
}

static CUresult fail_host_memory(ocp_error *error) {
  ocp_fail_memory(error);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Called with the mempool's lock held. */
static CUresult allocate(ocp_device *device, ocp_mempool *mempool, size_t size, ocp_stream *stream, uint64_t *address,
                         ocp_error *error) {
  ocp_chunk *chunk = calloc(1, sizeof *chunk);
  CUresult result = chunk ? open_pool(mempool, device, error) : fail_host_memory(error);
  if (result == CUDA_SUCCESS)
    result = stream ? driver_alloc(device, mempool, size, stream->handle, address, error)
                    : driver_alloc_at_once(device, mempool, size, address, error);
  if (result == CUDA_SUCCESS) {
    *chunk = (ocp_chunk){.address = *address, .size = size};
    if (ocp_chunk_table_insert(&mempool->table, chunk))
      return CUDA_SUCCESS;
    const CUstream order = stream ? stream->handle : mempool->frees;
    ocp_device_freed(device, device->driver->MemFreeAsync(*address, order), "cuMemFreeAsync");
    result = fail_host_memory(error);
  }
  free(chunk);
  return result;
}

CUresult ocp_mempool_alloc(ocp_device *device, size_t size, ocp_stream *stream, uint64_t *address, ocp_error *error) {
  ocp_pool *pool = device->pool;
  ocp_mempool *mempool = pool->mempool;
  ocp_arena *arena = pool->arenas[OCP_DEVICE_MEMORY];
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&mempool->lock);
  collect(device, mempool);
  pthread_mutex_lock(&pool->lock);
  const bool within_limit = ocp_arena_expect_pooled(arena, size);
  pthread_mutex_unlock(&pool->lock);
  if (within_limit) {
    result = allocate(device, mempool, size, stream, address, error);
    pthread_mutex_lock(&pool->lock);
    if (result == CUDA_SUCCESS)
      ocp_arena_pooled(arena, size);
    else
      ocp_arena_pooled_freed(arena, size);
    if (stream && result == CUDA_SUCCESS)
      ocp_pool_advance(pool, stream); /* counts the allocation as work of the stream: it must run before any use */
    pthread_mutex_unlock(&pool->lock);
  } else {
    ocp_fail(error, ORT_RUNTIME_EXCEPTION,
             "arena.max_mem: the limit leaves fewer than the %zu bytes that an allocation needs. Release sessions or "
             "tensors, or raise the limit",
             size);
  }
  pthread_mutex_unlock(&mempool->lock);
  return result;
}

/* ---- shrinking and statistics ---- */

int64_t ocp_mempool_shrink(ocp_device *device, bool keep) {
  ocp_mempool *mempool = device->pool->mempool;
  const ocp_driver *driver = device->driver;
  pthread_mutex_lock(&mempool->lock);
  const int64_t before = reserved_bytes(mempool, device);
  if (mempool->handle) {
    collect(device, mempool);
    if (!keep && mempool->table.count == 0 && !mempool->waiting) {
      close_pool(mempool, device);
    } else {
      const CUresult result = driver->MemPoolTrimTo(mempool->handle, keep ? (size_t)mempool->keep_bytes : 0);
      ocp_device_released(device, result, "cuMemPoolTrimTo");
    }
  }
  const int64_t after = reserved_bytes(mempool, device);
  pthread_mutex_unlock(&mempool->lock);
  return before - after;
}

int64_t ocp_mempool_held_bytes(ocp_device *device) {
  ocp_mempool *mempool = device->pool->mempool;
  pthread_mutex_lock(&mempool->lock);
  const int64_t bytes = reserved_bytes(mempool, device);
  pthread_mutex_unlock(&mempool->lock);
  return bytes;
}
