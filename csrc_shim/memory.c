/* Device and pinned memory: chunks of size classes, cached between a free and the next allocation.
 *
 * This is the place of an arena: who splits regions instead of keeping whole chunks replaces ocp_cache and keeps the
 * functions of pool.h. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"
#include "pool.h"

enum { ALIGNMENT = 256, CLASSES_PER_DOUBLING = 8, NUM_CLASSES = 8 + CLASSES_PER_DOUBLING * (48 - 11) };
/* Chunks of this size and more are not rounded up to their class but to this granularity, which wastes less. */
static const size_t LARGE_GRANULARITY = (size_t)2 << 20;
static const size_t LARGE = (size_t)16 << 20;
static const size_t MAX_BYTES = (size_t)1 << 47;
/* How many chunks of a class are looked at from either end. Passing over a usable one costs a driver call and never
 * correctness: the newest are warm in caches, the oldest the likeliest to be unused. */
enum { MAX_LOOKS = 8 };

typedef struct ocp_chunk {
  struct ocp_chunk *newer, *older; /* of its class, while cached */
  uint64_t address;
  size_t size;
  uint64_t stream_id; /* the only stream that used it before it was freed; 0: any may have */
  uint64_t freed_at;  /* sequence number */
  bool handed_out;
} ocp_chunk;

typedef struct ocp_chunks {
  ocp_chunk *newest, *oldest;
} ocp_chunks;

struct ocp_cache {
  ocp_chunks classes[NUM_CLASSES];
  /* All chunks by address: open addressing, a power of two of slots, at most half full. */
  ocp_chunk **table;
  size_t slots, count;
  ocp_memory_stats stats;
};

/* ---- size classes: steps of 256 bytes up to 2 KiB, then eight per doubling (at most 12.5 % waste) ---- */

static int size_class(size_t bytes) {
  if (bytes <= 2048)
    return (int)((bytes - 1) / ALIGNMENT);
  int log2 = 63 - __builtin_clzll(bytes - 1);
  int step = (int)((bytes - 1) >> (log2 - 3)) - CLASSES_PER_DOUBLING;
  return 8 + (log2 - 11) * CLASSES_PER_DOUBLING + step;
}

static size_t class_size(int index) {
  if (index < 8)
    return (size_t)(index + 1) * ALIGNMENT;
  int log2 = 11 + (index - 8) / CLASSES_PER_DOUBLING;
  int step = (index - 8) % CLASSES_PER_DOUBLING;
  return (size_t)(CLASSES_PER_DOUBLING + step + 1) << (log2 - 3);
}

static size_t round_up(size_t bytes, size_t granularity) {
  return (bytes + granularity - 1) / granularity * granularity;
}

static size_t chunk_size(size_t bytes) {
  return bytes >= LARGE ? round_up(bytes, LARGE_GRANULARITY) : class_size(size_class(bytes));
}

/* ---- the table of chunks ---- */

static size_t slot_of(const ocp_cache *cache, uint64_t address) {
  return (size_t)((address / ALIGNMENT) * 0x9E3779B97F4A7C15u >> 20) & (cache->slots - 1);
}

/* The slot of the address, or the empty one where it would go. */
static size_t find_slot(const ocp_cache *cache, uint64_t address) {
  size_t slot = slot_of(cache, address);
  while (cache->table[slot] && cache->table[slot]->address != address)
    slot = (slot + 1) & (cache->slots - 1);
  return slot;
}

static bool insert(ocp_cache *cache, ocp_chunk *chunk) {
  if (2 * (cache->count + 1) > cache->slots) {
    ocp_cache grown = {.slots = cache->slots ? 2 * cache->slots : 256};
    grown.table = calloc(grown.slots, sizeof *grown.table);
    if (!grown.table)
      return false;
    for (size_t i = 0; i < cache->slots; i++)
      if (cache->table[i])
        grown.table[find_slot(&grown, cache->table[i]->address)] = cache->table[i];
    free(cache->table);
    cache->table = grown.table;
    cache->slots = grown.slots;
  }
  cache->table[find_slot(cache, chunk->address)] = chunk;
  cache->count++;
  return true;
}

static void erase(ocp_cache *cache, uint64_t address) {
  size_t hole = find_slot(cache, address), mask = cache->slots - 1;
  assert(cache->table[hole]);
  /* Chunks behind the hole move into it unless that would put them before the slot where their search starts. */
  for (size_t slot = (hole + 1) & mask; cache->table[slot]; slot = (slot + 1) & mask) {
    size_t home = slot_of(cache, cache->table[slot]->address);
    if (((slot - home) & mask) >= ((slot - hole) & mask)) {
      cache->table[hole] = cache->table[slot];
      hole = slot;
    }
  }
  cache->table[hole] = NULL;
  cache->count--;
}

/* ---- pools ---- */

ocp_pool *ocp_pool_create(void) {
  ocp_pool *pool = calloc(1, sizeof *pool);
  if (!pool)
    return NULL;
  pthread_mutex_init(&pool->lock, NULL);
  pthread_mutex_init(&pool->streams_lock, NULL);
  for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++)
    if (!(pool->caches[memory] = calloc(1, sizeof *pool->caches[memory]))) {
      ocp_pool_destroy(pool);
      return NULL;
    }
  return pool;
}

void ocp_pool_destroy(ocp_pool *pool) {
  if (!pool)
    return;
  for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++)
    free(pool->caches[memory]);
  free(pool);
}

/* Whether work enqueued on `taker` from now on (NULL: anybody, at once) comes after all that used the chunk. */
static bool is_free_for(const ocp_pool *pool, const ocp_chunk *chunk, const ocp_stream *taker) {
  if (taker && chunk->stream_id == taker->priv->id)
    return true;
  for (const ocp_stream *stream = pool->streams; stream; stream = stream->priv->next)
    if (stream != taker && (chunk->stream_id == 0 || chunk->stream_id == stream->priv->id) &&
        atomic_load_explicit(&stream->priv->pending_from, memory_order_relaxed) <= chunk->freed_at)
      return false;
  return true;
}

static void hand_out(ocp_cache *cache, ocp_chunk *chunk) {
  ocp_memory_stats *stats = &cache->stats;
  chunk->handed_out = true;
  stats->in_use += (int64_t)chunk->size;
  stats->num_allocs++;
  if (stats->in_use > stats->max_in_use)
    stats->max_in_use = stats->in_use;
  if ((int64_t)chunk->size > stats->max_alloc_size)
    stats->max_alloc_size = (int64_t)chunk->size;
}

static void count_bytes(int memory, int64_t bytes) {
  ocp_count(memory == OCP_DEVICE_MEMORY ? OCP_DEVICE_BYTES_IN_USE : OCP_PINNED_BYTES_IN_USE, bytes);
}

static void add(ocp_cache *cache, ocp_chunk *chunk) {
  ocp_chunks *list = &cache->classes[size_class(chunk->size)];
  chunk->newer = NULL;
  chunk->older = list->newest;
  *(list->newest ? &list->newest->newer : &list->oldest) = chunk;
  list->newest = chunk;
  cache->stats.cached += (int64_t)chunk->size;
}

static void unlink_chunk(ocp_cache *cache, ocp_chunk *chunk) {
  ocp_chunks *list = &cache->classes[size_class(chunk->size)];
  *(chunk->newer ? &chunk->newer->older : &list->newest) = chunk->older;
  *(chunk->older ? &chunk->older->newer : &list->oldest) = chunk->newer;
  cache->stats.cached -= (int64_t)chunk->size;
}

/* Finds a cached chunk that fits, or NULL; *blocked says that one fits but may still be in use. */
static ocp_chunk *find(const ocp_pool *pool, const ocp_cache *cache, size_t bytes, const ocp_stream *taker,
                       bool *blocked) {
  const ocp_chunks *list = &cache->classes[size_class(bytes)];
  for (int end = 0; end < 2; end++) {
    ocp_chunk *chunk = end == 0 ? list->newest : list->oldest;
    for (int looks = 0; chunk && looks < MAX_LOOKS; chunk = end == 0 ? chunk->older : chunk->newer, looks++) {
      if (chunk->size < bytes)
        continue;
      if (is_free_for(pool, chunk, taker))
        return chunk;
      *blocked = true;
    }
  }
  return NULL;
}

/* Takes a cached chunk that fits, or NULL; blocked as in find. */
static ocp_chunk *take(ocp_pool *pool, ocp_cache *cache, size_t bytes, const ocp_stream *taker, bool *blocked) {
  ocp_chunk *chunk = find(pool, cache, bytes, taker, blocked);
  if (chunk) {
    unlink_chunk(cache, chunk);
    hand_out(cache, chunk);
  }
  return chunk;
}

/* Removes the cached chunks that nobody can be using and returns them as a list by `older`. */
static ocp_chunk *remove_free(ocp_pool *pool, ocp_cache *cache) {
  ocp_chunk *removed = NULL;
  for (int index = 0; index < NUM_CLASSES; index++)
    for (ocp_chunk *chunk = cache->classes[index].newest, *older; chunk; chunk = older) {
      older = chunk->older;
      if (!is_free_for(pool, chunk, NULL))
        continue;
      unlink_chunk(cache, chunk);
      erase(cache, chunk->address);
      chunk->older = removed;
      removed = chunk;
    }
  return removed;
}

static CUresult driver_alloc(const ocp_driver *driver, int memory, size_t bytes, uint64_t *address) {
  if (memory == OCP_DEVICE_MEMORY)
    return driver->MemAlloc(address, bytes);
  void *host = NULL;
  CUresult result = driver->MemHostAlloc(&host, bytes, CU_MEMHOSTALLOC_PORTABLE);
  *address = (uint64_t)(uintptr_t)host;
  return result;
}

static void driver_free(const ocp_driver *driver, int memory, uint64_t address) {
  if (memory == OCP_DEVICE_MEMORY)
    driver->MemFree(address);
  else
    driver->MemFreeHost((void *)(uintptr_t)address);
}

static void trim(ocp_device *device, int memory) {
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->lock);
  ocp_chunk *chunk = remove_free(pool, pool->caches[memory]);
  pool->caches[memory]->stats.num_trims++;
  pthread_mutex_unlock(&pool->lock);
  while (chunk) {
    ocp_chunk *next = chunk->older;
    driver_free(device->driver, memory, chunk->address);
    free(chunk);
    chunk = next;
  }
}

void ocp_device_trim(ocp_device *device) {
  ocp_error ignored = {0};
  if (ocp_device_enter(device, &ignored) != ORT_OK)
    return;
  ocp_pool_release_idle_streams(device->pool);
  ocp_pool_poll(device);
  for (int memory = 0; memory < OCP_NUM_MEMORIES; memory++)
    trim(device, memory);
}

static int out_of_memory(ocp_device *device, int memory, size_t bytes, ocp_error *error) {
  size_t free_bytes = 0, total = 0;
  ocp_memory_stats stats;
  ocp_pool_stats(device, memory, &stats);
  if (memory == OCP_DEVICE_MEMORY && device->driver->MemGetInfo(&free_bytes, &total) == CUDA_SUCCESS)
    return ocp_fail(error, ORT_EP_FAIL,
                    "out of memory on %sCUDA device %d: %zu bytes wanted, %zu of %zu free, %lld in use by this process",
                    device->emulated ? "emulated " : "", device->ordinal, bytes, free_bytes, total,
                    (long long)stats.in_use);
  return ocp_fail(error, ORT_EP_FAIL, "out of pinned host memory: %zu bytes wanted, %lld in use by this process", bytes,
                  (long long)stats.in_use);
}

/* Asks the driver, after giving back what is cached where that is needed. */
static int driver_alloc_trimming(ocp_device *device, int memory, size_t bytes, size_t *size, uint64_t *address,
                                 ocp_error *error) {
  *size = chunk_size(bytes);
  CUresult result = driver_alloc(device->driver, memory, *size, address);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    ocp_device_trim(device);
    *size = round_up(bytes, ALIGNMENT);
    result = driver_alloc(device->driver, memory, *size, address);
  }
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    if (ocp_pool_synchronize(device, error) != ORT_OK)
      return error->code;
    ocp_device_trim(device);
    result = driver_alloc(device->driver, memory, *size, address);
  }
  if (result == CUDA_ERROR_OUT_OF_MEMORY)
    return out_of_memory(device, memory, bytes, error);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, memory == OCP_DEVICE_MEMORY ? "cuMemAlloc" : "cuMemHostAlloc", error);
  return ORT_OK;
}

static int alloc_chunk(ocp_device *device, int memory, size_t bytes, ocp_chunk **out, ocp_error *error) {
  if (bytes > MAX_BYTES)
    return out_of_memory(device, memory, bytes, error);
  ocp_pool *pool = device->pool;
  ocp_cache *cache = pool->caches[memory];
  ocp_chunk *chunk = calloc(1, sizeof *chunk);
  if (!chunk)
    return ocp_fail(error, ORT_FAIL, "out of host memory");
  if (driver_alloc_trimming(device, memory, bytes, &chunk->size, &chunk->address, error) != ORT_OK) {
    free(chunk);
    return error->code;
  }
  pthread_mutex_lock(&pool->lock);
  bool inserted = insert(cache, chunk);
  if (inserted) {
    cache->stats.num_driver_allocs++;
    hand_out(cache, chunk);
  }
  pthread_mutex_unlock(&pool->lock);
  if (!inserted) {
    driver_free(device->driver, memory, chunk->address);
    free(chunk);
    return ocp_fail(error, ORT_FAIL, "out of host memory");
  }
  *out = chunk;
  return ORT_OK;
}

int ocp_pool_alloc(ocp_device *device, int memory, size_t bytes, ocp_stream *stream, uint64_t *address,
                   ocp_error *error) {
  ocp_pool *pool = device->pool;
  ocp_chunk *chunk = NULL;
  *address = 0;
  if (atomic_load_explicit(&ocp_forked, memory_order_relaxed))
    return ocp_fail(error, ORT_EP_FAIL, "%s", OCP_FORKED_TEXT);
  if (bytes == 0)
    bytes = 1;
  for (int polled = 0; polled < 2 && bytes <= MAX_BYTES; polled++) {
    bool blocked = false;
    pthread_mutex_lock(&pool->lock);
    chunk = take(pool, pool->caches[memory], bytes, stream, &blocked);
    pthread_mutex_unlock(&pool->lock);
    if (chunk || !blocked || polled)
      break;
    if (ocp_device_enter(device, error) != ORT_OK)
      return error->code;
    ocp_pool_poll(device);
  }
  if (!chunk &&
      (ocp_device_enter(device, error) != ORT_OK || alloc_chunk(device, memory, bytes, &chunk, error) != ORT_OK))
    return error->code;
  count_bytes(memory, (int64_t)chunk->size);
  *address = chunk->address;
  if (device->emulated && memory == OCP_DEVICE_MEMORY)
    ocp_emu_reuse(chunk->address, bytes, chunk->size, stream ? stream->handle : NULL);
  return ORT_OK;
}

bool ocp_pool_free(ocp_device *device, int memory, uint64_t address, ocp_stream *stream) {
  if (address == 0 || atomic_load_explicit(&ocp_forked, memory_order_relaxed))
    return true;
  ocp_pool *pool = device->pool;
  ocp_cache *cache = pool->caches[memory];
  pthread_mutex_lock(&pool->lock);
  ocp_chunk *chunk = cache->slots ? cache->table[find_slot(cache, address)] : NULL;
  bool valid = chunk && chunk->handed_out;
  if (valid) {
    chunk->handed_out = false;
    cache->stats.in_use -= (int64_t)chunk->size;
    if (stream)
      ocp_pool_advance(pool, stream);
    else
      pool->sequence++;
    chunk->stream_id = stream ? stream->priv->id : 0;
    chunk->freed_at = pool->sequence;
    add(cache, chunk);
    count_bytes(memory, -(int64_t)chunk->size);
  }
  pthread_mutex_unlock(&pool->lock);
  return valid;
}

void ocp_pool_stats(ocp_device *device, int memory, ocp_memory_stats *stats) {
  pthread_mutex_lock(&device->pool->lock);
  *stats = device->pool->caches[memory]->stats;
  pthread_mutex_unlock(&device->pool->lock);
}

int ocp_device_alloc(ocp_device *device, size_t bytes, ocp_stream *stream, CUdeviceptr *address, ocp_error *error) {
  return ocp_pool_alloc(device, OCP_DEVICE_MEMORY, bytes, stream, address, error);
}

void ocp_device_free(ocp_device *device, CUdeviceptr address, ocp_stream *stream) {
  bool valid = ocp_pool_free(device, OCP_DEVICE_MEMORY, address, stream);
  assert(valid && "address was not handed out");
  (void)valid;
}

int ocp_pinned_alloc(ocp_device *device, size_t bytes, void **address, ocp_error *error) {
  uint64_t host = 0;
  int code = ocp_pool_alloc(device, OCP_PINNED_MEMORY, bytes, NULL, &host, error);
  *address = (void *)(uintptr_t)host;
  return code;
}

void ocp_pinned_free(ocp_device *device, void *address) {
  bool valid = ocp_pool_free(device, OCP_PINNED_MEMORY, (uint64_t)(uintptr_t)address, NULL);
  assert(valid && "address was not handed out");
  (void)valid;
}
