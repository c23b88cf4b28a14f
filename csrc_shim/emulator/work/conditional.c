#include "emulator/work/conditional.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "emulator/findings.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list; taken after all other locks */
static emu_condition *conditions;

emu_condition *emu_condition_make(uint64_t graph, unsigned initial, bool assigns_default) {
  static _Atomic uint64_t handles;
  emu_condition *condition = calloc(1, sizeof *condition);
  if (!condition)
    return NULL;
  atomic_init(&condition->references, 1);
  condition->handle = atomic_fetch_add(&handles, 1) + 1;
  condition->graph = graph;
  condition->initial = initial;
  condition->assigns_default = assigns_default;
  pthread_mutex_lock(&lock);
  condition->next = conditions;
  conditions = condition;
  pthread_mutex_unlock(&lock);
  return condition;
}

emu_condition *emu_condition_find(CUgraphConditionalHandle handle) {
  pthread_mutex_lock(&lock);
  emu_condition *condition = conditions;
  while (condition && condition->handle != handle)
    condition = condition->next;
  if (condition)
    atomic_fetch_add(&condition->references, 1);
  pthread_mutex_unlock(&lock);
  return condition;
}

emu_condition *emu_condition_share(emu_condition *condition) {
  atomic_fetch_add(&condition->references, 1);
  return condition;
}

void emu_condition_release(emu_condition *condition) {
  if (!condition)
    return;
  pthread_mutex_lock(&lock); /* emu_condition_find must not find it after its last reference */
  const bool last = atomic_fetch_sub(&condition->references, 1) == 1;
  for (emu_condition **link = &conditions; last && *link; link = &(*link)->next)
    if (*link == condition) {
      *link = condition->next;
      break;
    }
  pthread_mutex_unlock(&lock);
  if (last)
    free(condition);
}

void emu_set_conditional(uint64_t handle, uint32_t value) {
  emu_condition *condition = emu_condition_find(handle);
  char text[EMU_FINDING_BYTES];
  if (condition) {
    atomic_store(&condition->value, value);
  } else {
    snprintf(text, sizeof text, "invalid-handle: cudaGraphSetConditional: no graph has the handle %llu",
             (unsigned long long)handle);
    emu_finding_keep(text);
  }
  emu_condition_release(condition);
}
