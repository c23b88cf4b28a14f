#include "base/thread_memory.h"

#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void *ocp_thread_memory_make(ocp_thread_memory *kind, size_t bytes) {
  pthread_mutex_lock(&lock);
  const bool has_key = kind->has_key = kind->has_key || pthread_key_create(&kind->key, kind->release) == 0;
  pthread_mutex_unlock(&lock);
  void *made = has_key ? calloc(1, bytes) : NULL;
  if (made && pthread_setspecific(kind->key, made)) {
    free(made);
    made = NULL;
  }
  return made;
}
