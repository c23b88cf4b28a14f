/* Device and pinned memory: allocates from the arenas, else from the driver, and recovers memory if neither has enough.
 *
 * An allocation tries these sources in order: memory that this thread's Run has freed while its allocations are
 * recorded for a CUDA graph (run_memory.h); a chunk of the arena, or CUDA's memory pool if the options select it; a
 * bound chunk (arena.h) whose work has finished; a new region of the driver. If the driver or the limit refuses a new
 * region, memory is recovered in three steps, each followed by another try: return unused regions to the driver;
 * synchronize all streams; call the reclaimers, whose owners free memory that they can do without (ocp_reclaimer).
 *
 * Invariants:
 * - Locks are taken in this order: reclaim_lock; the mutex of a cluster's instance cache, or the mempool's lock;
 *   streams_lock; the pool's lock. A reclaimer is called with no lock held but reclaim_lock, and the driver is never
 *   called with the pool's lock held.
 * - Counters and statistics change when a chunk is allocated and freed, by the chunk's size.
 * - While this thread captures a Run, or the stream is being captured, no memory is allocated from the driver. A Run
 *   that the application captures is an exception (run_memory.h). */
#define _GNU_SOURCE /* PTHREAD_MUTEX_ADAPTIVE_NP */
#include "device/memory/memory.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/counters.h"
#include "base/host.h"
#include "base/process.h"
#include "device/memory/arena.h"
#include "device/memory/arena_dump.h"
#include "device/memory/chunk_table.h"
#include "device/memory/mempool.h"
#include "device/order.h"
#include "device/release.h"
#include "device/wait.h"

/* ---- pools ---- */

/* Initializes an adaptive lock: a thread that finds it taken spins before it sleeps, because the owner usually holds
 * the lock for less than a microsecond. */
static void init_lock(pthread_mutex_t *lock) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
  pthread_mutex_init(lock, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

ocp_pool *ocp_pool_create(void) {
  ocp_pool *pool = calloc(1, sizeof *pool);
  if (!pool)
    return NULL;
  init_lock(&pool->lock);
  pthread_mutex_init(&pool->reclaim_lock, NULL);
  pthread_mutex_init(&pool->streams_lock, NULL);
  atomic_init(&pool->fill, -1);
  pool->mempool = ocp_mempool_create();
  for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++) {
    pool->arenas[memory] = calloc(1, sizeof *pool->arenas[memory]);
    if (pool->arenas[memory])
      ocp_arena_config_defaults(&pool->arenas[memory]->config);
  }
  if (pool->mempool && pool->arenas[OCP_DEVICE_MEMORY] && pool->arenas[OCP_PINNED_MEMORY])
    return pool;
  ocp_pool_destroy(pool);
  return NULL;
}

void ocp_pool_set_device_bytes(ocp_pool *pool, size_t total_bytes) {
  pool->arenas[OCP_DEVICE_MEMORY]->most_growth_bytes = ocp_arena_round(total_bytes / 16, 0);
}

void ocp_pool_destroy(ocp_pool *pool) {
  if (!pool)
    return;
  for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++)
    free(pool->arenas[memory]);
  ocp_mempool_destroy(pool->mempool);
  free(pool);
}

void ocp_pool_configure(ocp_pool *pool, int memory, const ocp_arena_config *config) {
  ocp_arena *arena = pool->arenas[memory];
  pthread_mutex_lock(&pool->lock);
  if (config->initial_chunk_size_bytes != arena->config.initial_chunk_size_bytes)
    arena->next_region_bytes = 0;
  arena->config = *config;
  pthread_mutex_unlock(&pool->lock);
  if (memory == OCP_DEVICE_MEMORY)
    ocp_mempool_configure(pool->mempool, config);
}

/* ---- the driver ---- */

static CUresult driver_alloc(const ocp_driver *driver, int memory, size_t bytes, uint64_t *address) {
  if (memory == OCP_DEVICE_MEMORY)
    return driver->MemAlloc(address, bytes);
  void *host = NULL;
  CUresult result = driver->MemHostAlloc(&host, bytes, CU_MEMHOSTALLOC_PORTABLE);
  *address = (uint64_t)(uintptr_t)host;
  return result;
}

static ocp_freed driver_free(ocp_device *device, int memory, uint64_t address) {
  const ocp_driver *driver = device->driver;
  return memory == OCP_DEVICE_MEMORY
             ? ocp_device_freed(device, driver->MemFree(address), "cuMemFree")
             : ocp_device_freed(device, driver->MemFreeHost((void *)(uintptr_t)address), "cuMemFreeHost");
}

/* Counts a region as held again, because the driver has not freed it (`freed`: why). */
static void keep_region(ocp_pool *pool, int memory, ocp_region *region, ocp_freed freed) {
  ocp_arena *arena = pool->arenas[memory];
  pthread_mutex_lock(&pool->lock);
  if (freed == OCP_FREE_LATER)
    ocp_arena_keep_unfreed(arena, region);
  else
    ocp_arena_lose(arena, region->size);
  pthread_mutex_unlock(&pool->lock);
  if (freed != OCP_FREE_LATER)
    free(region);
}

/* Frees regions that the arena has removed. Returns the number of bytes that went back to the driver. */
static int64_t free_regions(ocp_device *device, int memory, ocp_region *region) {
  int64_t bytes = 0;
  for (ocp_region *next; region; region = next) {
    next = region->next;
    const ocp_freed freed = driver_free(device, memory, region->address);
    if (freed != OCP_FREED) {
      keep_region(device->pool, memory, region, freed);
      continue;
    }
    bytes += (int64_t)region->size;
    free(region);
  }
  return bytes;
}

static void count_bytes(int memory, int64_t bytes) {
  ocp_count(memory == OCP_DEVICE_MEMORY ? OCP_DEVICE_BYTES_IN_USE : OCP_PINNED_BYTES_IN_USE, bytes);
}

/* ---- shrinking ---- */

int64_t ocp_pool_shrink(ocp_device *device, int memory, bool keep) {
  ocp_pool *pool = device->pool;
  ocp_arena *arena = pool->arenas[memory];
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (!stay.entered)
    return 0;
  ocp_pool_poll(device);
  pthread_mutex_lock(&pool->lock);
  ocp_arena_unbind(pool, arena);
  ocp_region *regions = ocp_arena_remove_unused(pool, arena);
  if (regions)
    ocp_arena_restart_growth(arena);
  arena->stats.num_shrinkages++;
  pthread_mutex_unlock(&pool->lock);
  int64_t bytes = free_regions(device, memory, regions);
  if (memory == OCP_DEVICE_MEMORY)
    bytes += ocp_mempool_shrink(device, keep);
  return bytes;
}

static void reclaim(ocp_device *device) {
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->reclaim_lock);
  for (ocp_reclaimer *reclaimer = pool->reclaimers; reclaimer; reclaimer = reclaimer->next)
    reclaimer->reclaim(reclaimer);
  pthread_mutex_unlock(&pool->reclaim_lock);
}

static int64_t give_back(ocp_device *device, bool keep) {
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (!stay.entered)
    return 0;
  reclaim(device);
  ocp_pool_release_idle_streams(device->pool);
  int64_t bytes = 0;
  for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++)
    bytes += ocp_pool_shrink(device, memory, keep && !atomic_load(&device->lost));
  return bytes;
}

int64_t ocp_device_trim(ocp_device *device) { return give_back(device, false); }

int64_t ocp_device_shrink(ocp_device *device) { return give_back(device, true); }

void ocp_pool_run_ended(ocp_device *device) {
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->lock);
  for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++)
    ocp_arena_unbind(pool, pool->arenas[memory]);
  pthread_mutex_unlock(&pool->lock);
  ocp_mempool_collect(device);
}

/* ---- reclaimers ---- */

void ocp_reclaimer_add(ocp_device *device, ocp_reclaimer *reclaimer) {
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->reclaim_lock);
  reclaimer->next = pool->reclaimers;
  pool->reclaimers = reclaimer;
  pthread_mutex_unlock(&pool->reclaim_lock);
}

void ocp_reclaimer_remove(ocp_device *device, ocp_reclaimer *reclaimer) {
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->reclaim_lock);
  for (ocp_reclaimer **link = &pool->reclaimers; *link; link = &(*link)->next)
    if (*link == reclaimer) {
      *link = reclaimer->next;
      break;
    }
  pthread_mutex_unlock(&pool->reclaim_lock);
}

/* ---- out of memory ---- */

int ocp_device_available(ocp_device *device, uint64_t *bytes, ocp_error *error) {
  size_t free_bytes = 0, total = 0;
  ocp_memory_stats stats;
  *bytes = 0;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  const CUresult result = device->driver->MemGetInfo(&free_bytes, &total);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "cuMemGetInfo", error);
  ocp_pool_stats(device, OCP_DEVICE_MEMORY, &stats);
  const uint64_t idle = stats.total > stats.in_use ? (uint64_t)(stats.total - stats.in_use) : 0;
  const uint64_t allowed = stats.limit > stats.in_use ? (uint64_t)(stats.limit - stats.in_use) : 0;
  *bytes = free_bytes + idle < allowed ? free_bytes + idle : allowed;
  return ORT_OK;
}

/* Logs the sizes of the arena's chunks, which show whether memory is fragmented or exhausted. Logs nothing for an
 * arena without regions, such as one that a CUDA memory pool replaces. */
static void log_arena(ocp_device *device, int memory) {
  char text[OCP_ARENA_DUMP_BYTES];
  pthread_mutex_lock(&device->pool->lock);
  const ocp_arena *arena = device->pool->arenas[memory];
  const bool holds = arena->regions != NULL;
  if (holds)
    ocp_arena_dump(arena, text, sizeof text);
  pthread_mutex_unlock(&device->pool->lock);
  if (holds)
    ocp_log(ORT_LOGGING_LEVEL_WARNING, text, "Alloc");
}

static int out_of_memory(ocp_device *device, int memory, size_t bytes, ocp_error *error) {
  size_t free_bytes = 0, total = 0;
  ocp_memory_stats stats;
  ocp_pool_stats(device, memory, &stats);
  log_arena(device, memory);
  char limit[64] = "", where[64] = "of pinned host memory", of_device[96] = "";
  if (stats.limit != INT64_MAX)
    snprintf(limit, sizeof limit, ", limit %lld", (long long)stats.limit);
  if (memory == OCP_DEVICE_MEMORY) {
    snprintf(where, sizeof where, "on %sCUDA device %d", device->emulated ? "emulated " : "", device->ordinal);
    if (device->driver->MemGetInfo(&free_bytes, &total) == CUDA_SUCCESS)
      snprintf(of_device, sizeof of_device, "; %zu of the device's %zu are free", free_bytes, total);
  }
  return ocp_fail(error, ORT_RUNTIME_EXCEPTION,
                  "out of memory %s: %zu bytes wanted; this process uses %lld (peak %lld, weights %lld) of the %lld "
                  "bytes that it holds%s%s. Release sessions or tensors, use smaller inputs%s",
                  where, bytes, (long long)stats.in_use, (long long)stats.max_in_use, (long long)stats.weights,
                  (long long)stats.total, limit, of_device, *limit ? ", or raise the limit (arena.max_mem)" : "");
}

/* Recovers memory after failed attempt number `attempt` (from 0) to allocate. False: nothing is left to try, or, with
 * the error, waiting for the streams has failed. */
static bool make_room(ocp_device *device, int memory, int attempt, ocp_error *error) {
  if (attempt > 2)
    return false;
  if (attempt == 2)
    reclaim(device);
  if (attempt > 0 && ocp_pool_synchronize(device, error) != ORT_OK)
    return false;
  ocp_pool_shrink(device, memory, false);
  return true;
}

/* ---- allocation ---- */

/* The parameters of an allocation. */
typedef struct request {
  ocp_device *device;
  int memory;
  size_t bytes, size; /* requested bytes; bytes of the chunk */
  ocp_stream *stream;
  bool reserve, exactly;
} request;

/* Whether to report the request to the emulated device, which ignores the report outside of its checking mode. */
static bool is_reported(const request *r) { return r->device->driver->ReuseMemory && r->memory == OCP_DEVICE_MEMORY; }

/* Allocates a chunk of the arena without a driver call; NULL: no chunk fits. */
static ocp_chunk *take(const request *r) {
  ocp_pool *pool = r->device->pool;
  ocp_arena *arena = pool->arenas[r->memory];
  pthread_mutex_lock(&pool->lock);
  ocp_chunk *chunk = ocp_arena_take(pool, arena, r->size, r->stream);
  if (!chunk && ocp_arena_unbind(pool, arena))
    chunk = ocp_arena_take(pool, arena, r->size, r->stream);
  pthread_mutex_unlock(&pool->lock);
  return chunk;
}

static CUresult add_region(const request *r, ocp_chunk **chunk) {
  ocp_pool *pool = r->device->pool;
  ocp_arena *arena = pool->arenas[r->memory];
  pthread_mutex_lock(&pool->lock);
  const size_t bytes = ocp_arena_plan_region(arena, r->size, r->exactly || r->reserve);
  pthread_mutex_unlock(&pool->lock);
  uint64_t address = 0;
  CUresult result = bytes ? driver_alloc(r->device->driver, r->memory, bytes, &address) : CUDA_ERROR_OUT_OF_MEMORY;
  if (result == CUDA_SUCCESS && is_reported(r))
    r->device->driver->ReuseMemory(address, 0, bytes,
                                   NULL); /* tells the checking mode that nothing in the new region is allocated yet */
  pthread_mutex_lock(&pool->lock);
  *chunk = result == CUDA_SUCCESS ? ocp_arena_add_region(arena, address, bytes, r->size) : NULL;
  if (result != CUDA_SUCCESS) {
    ocp_arena_cancel(arena, bytes);
  } else if (!*chunk) {
    /* out of host memory: freed below */
  } else if (r->reserve) {
    (*chunk)->region->reserved = true;
    arena->stats.num_reserves++;
    arena->stats.weights += (int64_t)(*chunk)->size;
  } else {
    arena->stats.num_extensions++;
  }
  pthread_mutex_unlock(&pool->lock);
  if (result != CUDA_SUCCESS || *chunk)
    return result;
  if (driver_free(r->device, r->memory, address) == OCP_FREED) {
    pthread_mutex_lock(&pool->lock);
    ocp_arena_cancel(arena, bytes);
    pthread_mutex_unlock(&pool->lock);
  }
  return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Allocates a chunk whose work a query of the streams finds finished, else a chunk of a new region. */
static CUresult fetch(const request *r, ocp_chunk **chunk) {
  if (!r->reserve) {
    ocp_pool_poll(r->device);
    *chunk = take(r);
    if (*chunk)
      return CUDA_SUCCESS;
  }
  return add_region(r, chunk);
}

static bool uses_mempool(const request *r) {
  /* A stream-ordered allocation on a captured stream would be a node of the graph. */
  return r->memory == OCP_DEVICE_MEMORY && !r->reserve && !ocp_run_memory_is_foreign() &&
         ocp_mempool_is_wanted(r->device->pool->mempool);
}

static int fail_in_capture(const request *r, ocp_error *error) {
  return ocp_fail(error, ORT_RUNTIME_EXCEPTION,
                  "a CUDA graph is being captured and needs %zu bytes of new memory, but the driver cannot allocate "
                  "memory during a capture. Run once without capture first",
                  r->bytes);
}

static int fetch_or_make_room(request *r, uint64_t *address, size_t *size, ocp_error *error) {
  ocp_device *device = r->device;
  if (r->bytes > OCP_ARENA_MAX_BYTES)
    return out_of_memory(device, r->memory, r->bytes, error);
  if (!ocp_run_memory_is_foreign() &&
      (ocp_run_memory_is_captured() || (r->stream && atomic_load(&r->stream->capturing))))
    return fail_in_capture(r, error);
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  const bool mempool = uses_mempool(r);
  for (int attempt = 0;; attempt++) {
    CUresult result;
    ocp_chunk *chunk = NULL;
    r->exactly = attempt > 0;
    if (mempool) {
      result = ocp_mempool_alloc(device, r->size, r->stream, address, error);
      *size = r->size;
    } else if ((result = fetch(r, &chunk)) == CUDA_SUCCESS) {
      *address = chunk->address;
      *size = chunk->size;
    } else {
      ocp_device_fail(device, result, r->memory == OCP_DEVICE_MEMORY ? "cuMemAlloc" : "cuMemHostAlloc", error);
    }
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY)
      return error->code;
    error->code = ORT_OK;
    if (result == CUDA_SUCCESS)
      return ORT_OK;
    if (!make_room(device, r->memory, attempt, error))
      return error->code != ORT_OK ? error->code : out_of_memory(device, r->memory, r->bytes, error);
  }
}

void ocp_device_fill_new_memory(ocp_device *device, int byte) { atomic_store(&device->pool->fill, byte); }

/* Fills memory that is about to be handed out, if the device's memory is to be filled. Without a stream it waits for
 * the fill, since work of any stream may use the memory. */
static int fill(const request *r, uint64_t address, size_t size, ocp_error *error) {
  ocp_device *device = r->device;
  const int byte = atomic_load_explicit(&device->pool->fill, memory_order_relaxed);
  if (byte < 0 || r->memory != OCP_DEVICE_MEMORY || (r->stream && atomic_load(&r->stream->capturing)))
    return ORT_OK;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  CUstream stream = r->stream ? r->stream->handle : NULL;
  const CUresult result = device->driver->MemsetD8Async(address, (unsigned char)byte, size, stream);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "filling new memory: cuMemsetD8Async", error);
  if (r->stream) {
    ocp_stream_enqueued(r->stream);
    return ORT_OK;
  }
  const CUresult ended = device->driver->StreamSynchronize(NULL);
  return ended == CUDA_SUCCESS ? ORT_OK : ocp_device_fail(device, ended, "cuStreamSynchronize", error);
}

static int allocate(request *r, uint64_t *address, ocp_error *error) {
  ocp_device *device = r->device;
  size_t size = 0;
  *address = 0;
  error->code = ORT_OK;
  if (atomic_load_explicit(&ocp_forked, memory_order_relaxed))
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s", OCP_FORKED_TEXT);
  if ((*address = ocp_run_memory_reuse(device, r->memory, r->bytes)))
    return ORT_OK;
  const ocp_driver *driver = device->driver;
  const bool reported = is_reported(r);
  if (r->bytes <= OCP_ARENA_MAX_BYTES)
    r->size = ocp_arena_round(r->bytes, reported ? driver->RedZone() : 0);
  ocp_chunk *chunk = r->bytes > OCP_ARENA_MAX_BYTES || r->reserve || uses_mempool(r) ? NULL : take(r);
  if (chunk) {
    *address = chunk->address;
    size = chunk->size;
  } else if (fetch_or_make_room(r, address, &size, error) != ORT_OK) {
    *address = 0;
    return error->code;
  }
  count_bytes(r->memory, (int64_t)size);
  /* In the checking mode the Run's record has the requested size: a reuse of the block must not get bytes beyond it. */
  if (!ocp_run_memory_allocated(device, r->memory, *address, reported ? r->bytes : size)) {
    ocp_pool_free(device, r->memory, *address, NULL);
    *address = 0;
    return ocp_fail_memory(error);
  }
  if (reported && driver->ReuseMemory(*address, r->bytes ? r->bytes : 1, size, r->stream ? r->stream->handle : NULL))
    ocp_stream_enqueued(r->stream);
  if (fill(r, *address, reported ? r->bytes : size, error) != ORT_OK) {
    ocp_pool_free(device, r->memory, *address, NULL);
    *address = 0;
    return error->code;
  }
  return ORT_OK;
}

int ocp_pool_alloc(ocp_device *device, int memory, size_t bytes, ocp_stream *stream, uint64_t *address,
                   ocp_error *error) {
  request r = {.device = device, .memory = memory, .bytes = bytes, .stream = stream};
  return allocate(&r, address, error);
}

int ocp_pool_reserve(ocp_device *device, int memory, size_t bytes, uint64_t *address, ocp_error *error) {
  request r = {.device = device, .memory = memory, .bytes = bytes, .reserve = true};
  return allocate(&r, address, error);
}

/* ---- free ---- */

/* Gives a chunk back to the arena. If its region was reserved and no work can be using it, removes the region from the
 * arena and returns it, for the caller to free; a reserved region that work may still use becomes part of the arena. */
static ocp_region *give(ocp_pool *pool, int memory, ocp_chunk *chunk) {
  ocp_arena *arena = pool->arenas[memory];
  ocp_region *region = chunk->region;
  const bool reserved = region->reserved;
  if (reserved)
    arena->stats.weights -= (int64_t)chunk->size;
  region->reserved = false;
  ocp_arena_give(pool, arena, chunk);
  return reserved ? ocp_arena_remove_region(pool, arena, region) : NULL;
}

bool ocp_pool_free(ocp_device *device, int memory, uint64_t address, ocp_stream *stream) {
  if (address == 0 || atomic_load_explicit(&ocp_forked, memory_order_relaxed) ||
      ocp_run_memory_keeps(device, memory, address))
    return true;
  ocp_pool *pool = device->pool;
  ocp_region *unused = NULL;
  pthread_mutex_lock(&pool->lock);
  ocp_chunk *chunk = ocp_chunk_table_find(&pool->arenas[memory]->table, address);
  const bool valid = chunk && chunk->handed_out;
  if (valid) {
    if (stream)
      ocp_pool_advance(pool, stream);
    else
      pool->sequence++;
    chunk->stream_id = stream ? stream->priv->id : 0;
    chunk->freed_at = pool->sequence;
    count_bytes(memory, -(int64_t)chunk->size);
    unused = give(pool, memory, chunk);
  }
  pthread_mutex_unlock(&pool->lock);
  if (unused) {
    OCP_STAY stay = ocp_device_enter_to_release(device);
    if (stay.entered)
      free_regions(device, memory, unused);
  }
  if (valid || memory != OCP_DEVICE_MEMORY)
    return valid;
  size_t size = 0;
  const bool of_mempool = ocp_mempool_free(device, address, stream, &size);
  count_bytes(memory, -(int64_t)size);
  return of_mempool;
}

void ocp_run_memory_release(ocp_run_memory *memory) {
  for (ocp_run_block *b = memory->blocks, *next; b; b = next) {
    next = b->next;
    if (b->freed)
      ocp_pool_free(memory->device, b->memory, b->address, NULL);
    free(b);
  }
  memory->blocks = NULL;
}

/* ---- statistics ---- */

void ocp_pool_stats(ocp_device *device, int memory, ocp_memory_stats *stats) {
  const ocp_arena *arena = device->pool->arenas[memory];
  pthread_mutex_lock(&device->pool->lock);
  *stats = arena->stats;
  stats->limit = arena->config.max_mem;
  pthread_mutex_unlock(&device->pool->lock);
  if (memory == OCP_DEVICE_MEMORY)
    stats->total += ocp_mempool_held_bytes(device);
}

/* ---- device memory ---- */

int ocp_device_alloc(ocp_device *device, size_t bytes, ocp_stream *stream, CUdeviceptr *address, ocp_error *error) {
  return ocp_pool_alloc(device, OCP_DEVICE_MEMORY, bytes, stream, address, error);
}

int ocp_device_reserve(ocp_device *device, size_t bytes, CUdeviceptr *address, ocp_error *error) {
  return ocp_pool_reserve(device, OCP_DEVICE_MEMORY, bytes, address, error);
}

void ocp_device_free(ocp_device *device, CUdeviceptr address, ocp_stream *stream) {
  bool valid = ocp_pool_free(device, OCP_DEVICE_MEMORY, address, stream);
  assert(valid && "address was not handed out");
  (void)valid;
}
