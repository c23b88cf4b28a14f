#include "device/run_memory.h"

#include <pthread.h>
#include <stdlib.h>

/* Record of the calling thread's watched Run; NULL: the thread has no watched Run. */
static _Thread_local ocp_run_memory *watched;
/* The records of all threads, since another thread may free the memory of a recorded Run; guarded by `lock`. */
enum { MAX_WATCHED = 64 };
static ocp_run_memory *all[MAX_WATCHED];
static atomic_uint num_watched;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int ocp_run_memory_watch(ocp_run_memory *memory, ocp_device *device, bool captured, ocp_error *error) {
  int place = MAX_WATCHED;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_WATCHED; i++)
    place = all[i] || place < MAX_WATCHED ? place : i;
  if (place < MAX_WATCHED) {
    all[place] = memory;
    memory->device = device;
    memory->captured = captured;
  }
  pthread_mutex_unlock(&lock);
  if (place == MAX_WATCHED)
    return ocp_fail(error, ORT_FAIL, "more than %d threads capture CUDA graphs at once. Let fewer threads capture",
                    MAX_WATCHED);
  atomic_fetch_add(&num_watched, 1);
  watched = memory;
  return ORT_OK;
}

void ocp_run_memory_unwatch(ocp_run_memory *memory) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_WATCHED; i++)
    if (all[i] == memory)
      all[i] = NULL;
  memory->captured = false;
  pthread_mutex_unlock(&lock);
  atomic_fetch_sub(&num_watched, 1);
  watched = NULL;
}

void ocp_run_memory_forget(void) { watched = NULL; }

ocp_run_memory *ocp_run_memory_pause(void) {
  ocp_run_memory *paused = watched;
  watched = NULL;
  return paused;
}

void ocp_run_memory_resume(ocp_run_memory *paused) { watched = paused; }

void ocp_run_memory_forget_held(ocp_run_memory *memory) {
  for (ocp_run_block **link = &memory->blocks, *b; (b = *link);) {
    if (b->freed) {
      link = &b->next;
      continue;
    }
    *link = b->next;
    free(b);
  }
}

bool ocp_run_memory_is_captured(void) { return watched && watched->captured; }

bool ocp_run_memory_is_foreign(void) { return ocp_run_memory_is_captured() && watched->foreign; }

uint64_t ocp_run_memory_reuse(const ocp_device *device, int memory, size_t bytes) {
  if (!watched || watched->device != device)
    return 0;
  pthread_mutex_lock(&lock);
  ocp_run_block *best = NULL;
  for (ocp_run_block *b = watched->blocks; b; b = b->next)
    if (b->freed && b->memory == memory && b->bytes >= bytes && (!best || b->bytes < best->bytes))
      best = b;
  if (best)
    best->freed = false;
  pthread_mutex_unlock(&lock);
  return best ? best->address : 0;
}

bool ocp_run_memory_allocated(const ocp_device *device, int memory, uint64_t address, size_t bytes) {
  if (!watched || watched->device != device)
    return true;
  ocp_run_block *b = malloc(sizeof *b);
  if (!b)
    return false;
  pthread_mutex_lock(&lock);
  *b = (ocp_run_block){.next = watched->blocks, .address = address, .bytes = bytes, .memory = memory};
  watched->blocks = b;
  pthread_mutex_unlock(&lock);
  return true;
}

bool ocp_run_memory_keeps(const ocp_device *device, int memory, uint64_t address) {
  if (atomic_load_explicit(&num_watched, memory_order_relaxed) == 0)
    return false;
  bool kept = false;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_WATCHED && !kept; i++) {
    if (!all[i] || all[i]->device != device)
      continue;
    for (ocp_run_block *b = all[i]->blocks; b && !kept; b = b->next)
      if (b->address == address && b->memory == memory && !b->freed)
        kept = b->freed = true;
  }
  pthread_mutex_unlock(&lock);
  return kept;
}
