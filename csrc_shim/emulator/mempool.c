/* Memory pools of the emulated device. An allocation takes effect in the call. A free is an operation of its stream;
 * after it has run, the pool can reuse the block. Freed blocks stay in the pool until one of these events: the program
 * trims or destroys the pool; it waits for work while the pool holds more than its release threshold; another
 * allocation needs the memory. */
#include "emulator/mempool.h"

#include <stdlib.h>

#include "emulator/heap.h"
#include "emulator/shadow.h"

typedef struct block {
  struct block *next;
  struct CUmemPoolHandle_st *pool;
  uint64_t address, bytes;
  bool live, freeing; /* allocated and not yet freed; the free has been enqueued but has not run */
} block;

struct CUmemPoolHandle_st {
  struct CUmemPoolHandle_st *next;
  emu_device *device;
  uint64_t threshold, max_bytes;
  uint64_t reserved, used, most_reserved, most_used;
  block *blocks;
  bool destroyed;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken after all other locks except the heap's */
static struct CUmemPoolHandle_st *_Atomic pools;         /* written under the lock; compared with NULL without it */

/* ---- called with the lock held ---- */

static void release_block(block **link) {
  block *gone = *link;
  *link = gone->next;
  gone->pool->reserved -= gone->bytes;
  emu_heap_free(&gone->pool->device->heap, gone->address);
  atomic_fetch_sub(&emu.live, 1);
  free(gone);
}

/* Returns unused blocks to the heap while the pool holds more than `keep` bytes. */
static void trim(struct CUmemPoolHandle_st *pool, uint64_t keep) {
  for (block **link = &pool->blocks; *link && pool->reserved > keep;)
    if ((*link)->live)
      link = &(*link)->next;
    else
      release_block(link);
}

static void release_pool_if_done(struct CUmemPoolHandle_st *pool) {
  if (!pool->destroyed || pool->used)
    return;
  trim(pool, 0);
  if (pools == pool) {
    pools = pool->next;
  } else {
    struct CUmemPoolHandle_st *before = pools;
    while (before->next != pool)
      before = before->next;
    before->next = pool->next;
  }
  atomic_fetch_sub(&emu.live, 1);
  free(pool);
}

static void raise_to(uint64_t *most, uint64_t value) {
  if (value > *most)
    *most = value;
}

/* Finds the smallest unused block of at least `bytes` and at most twice as many bytes; NULL: there is none. */
static block *find_unused(const struct CUmemPoolHandle_st *pool, uint64_t bytes) {
  block *best = NULL;
  for (block *other = pool->blocks; other; other = other->next)
    if (!other->live && other->bytes >= bytes && other->bytes <= 2 * bytes && (!best || other->bytes < best->bytes))
      best = other;
  return best;
}

static block *make_block(struct CUmemPoolHandle_st *pool, uint64_t bytes) {
  if (pool->max_bytes && pool->reserved + bytes > pool->max_bytes)
    return NULL;
  block *made = calloc(1, sizeof *made);
  const uint64_t address = made ? emu_heap_alloc(&pool->device->heap, bytes) : 0;
  if (!address) {
    free(made);
    return NULL;
  }
  emu_shadow_allocated(address, bytes);
  atomic_fetch_add(&emu.live, 1);
  *made = (block){.next = pool->blocks, .pool = pool, .address = address, .bytes = bytes};
  pool->blocks = made;
  pool->reserved += bytes;
  raise_to(&pool->most_reserved, pool->reserved);
  return made;
}

static block *take(struct CUmemPoolHandle_st *pool, uint64_t bytes) {
  block *found = find_unused(pool, bytes);
  if (found)
    emu_shadow_reused(found->address, bytes, found->bytes);
  else
    found = make_block(pool, bytes);
  if (!found) {
    for (struct CUmemPoolHandle_st *other = pools; other; other = other->next)
      if (other->device == pool->device)
        trim(other, 0);
    found = make_block(pool, bytes);
  }
  if (!found)
    return NULL;
  found->live = true;
  found->freeing = false;
  pool->used += found->bytes;
  raise_to(&pool->most_used, pool->used);
  return found;
}

static block *find_live(uint64_t address) {
  for (struct CUmemPoolHandle_st *pool = pools; pool; pool = pool->next)
    for (block *other = pool->blocks; other; other = other->next)
      if (other->address == address && other->live)
        return other;
  return NULL;
}

bool emu_mempool_owns(uint64_t address) {
  bool owns = false;
  pthread_mutex_lock(&lock);
  for (const struct CUmemPoolHandle_st *pool = pools; pool; pool = pool->next)
    for (const block *other = pool->blocks; other; other = other->next)
      owns |= other->address == address;
  pthread_mutex_unlock(&lock);
  return owns;
}

static bool is_pool(const struct CUmemPoolHandle_st *pool) {
  const struct CUmemPoolHandle_st *known = pools;
  while (known && known != pool)
    known = known->next;
  return known && !known->destroyed;
}

/* ---- for the rest of the emulator ---- */

CUresult emu_mempool_allocate(CUdeviceptr *address, uint64_t bytes, CUmemoryPool pool) {
  pthread_mutex_lock(&lock);
  const bool known = is_pool(pool);
  const block *found = known ? take(pool, bytes) : NULL;
  if (found)
    *address = found->address;
  pthread_mutex_unlock(&lock);
  return found ? CUDA_SUCCESS : known ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
}

bool emu_mempool_begin_free(uint64_t address) {
  pthread_mutex_lock(&lock);
  block *freed = find_live(address);
  const bool valid = freed && !freed->freeing;
  if (valid)
    freed->freeing = true;
  pthread_mutex_unlock(&lock);
  return valid;
}

void emu_mempool_cancel_free(uint64_t address) {
  pthread_mutex_lock(&lock);
  block *freed = find_live(address);
  if (freed)
    freed->freeing = false;
  pthread_mutex_unlock(&lock);
}

void emu_mempool_run_free(uint64_t address) {
  pthread_mutex_lock(&lock);
  block *freed = find_live(address);
  if (freed) {
    freed->live = false;
    freed->pool->used -= freed->bytes;
    emu_shadow_reused(address, 0, freed->bytes);
    release_pool_if_done(freed->pool);
  }
  pthread_mutex_unlock(&lock);
}

void emu_mempools_synchronized(const emu_device *device) {
  if (!atomic_load_explicit(&pools, memory_order_relaxed)) /* saves the lock: every wait for a stream calls this */
    return;
  pthread_mutex_lock(&lock);
  for (struct CUmemPoolHandle_st *pool = pools; pool; pool = pool->next)
    if (pool->device == device)
      trim(pool, pool->threshold);
  pthread_mutex_unlock(&lock);
}

/* ---- members of the driver table ---- */

CUresult emu_mem_pool_create(CUmemoryPool *pool, const CUmemPoolProps *props) {
  CUresult result = emu_leave();
  if (result == CUDA_ERROR_NOT_INITIALIZED)
    return result;
  if (!pool || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
      props->location.type != CU_MEM_LOCATION_TYPE_DEVICE || props->location.id < 0 ||
      props->location.id >= (int)emu.config.num_devices)
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "a memory pool must hold pinned allocations of one device");
  struct CUmemPoolHandle_st *made = calloc(1, sizeof *made);
  if (!made)
    return CUDA_ERROR_OUT_OF_MEMORY;
  made->device = &emu.devices[props->location.id];
  made->max_bytes = props->maxSize;
  pthread_mutex_lock(&lock);
  made->next = pools;
  pools = made;
  pthread_mutex_unlock(&lock);
  atomic_fetch_add(&emu.live, 1);
  *pool = made;
  return CUDA_SUCCESS;
}

CUresult emu_mem_pool_destroy(CUmemoryPool pool) {
  pthread_mutex_lock(&lock);
  const bool known = is_pool(pool);
  if (known) {
    pool->destroyed = true;
    release_pool_if_done(pool);
  }
  pthread_mutex_unlock(&lock);
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult emu_mem_pool_set_attribute(CUmemoryPool pool, int attribute, void *value) {
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  if (!is_pool(pool) || !value)
    result = CUDA_ERROR_INVALID_VALUE;
  else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    pool->threshold = *(const uint64_t *)value;
  else
    result = emu_fail(CUDA_ERROR_INVALID_VALUE, "memory pool attribute %d is not emulated", attribute);
  pthread_mutex_unlock(&lock);
  return result;
}

CUresult emu_mem_pool_get_attribute(CUmemoryPool pool, int attribute, void *value) {
  CUresult result = CUDA_SUCCESS;
  uint64_t *out = value;
  pthread_mutex_lock(&lock);
  if (!is_pool(pool) || !value)
    result = CUDA_ERROR_INVALID_VALUE;
  else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    *out = pool->threshold;
  else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    *out = pool->reserved;
  else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
    *out = pool->most_reserved;
  else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    *out = pool->used;
  else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    *out = pool->most_used;
  else
    result = emu_fail(CUDA_ERROR_INVALID_VALUE, "memory pool attribute %d is not emulated", attribute);
  pthread_mutex_unlock(&lock);
  return result;
}

CUresult emu_mem_pool_trim_to(CUmemoryPool pool, size_t keep) {
  pthread_mutex_lock(&lock);
  const bool known = is_pool(pool);
  if (known)
    trim(pool, keep);
  pthread_mutex_unlock(&lock);
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
