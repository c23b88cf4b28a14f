/* Memory that each thread has of its own, made when the thread first asks for it and released when the thread ends: the
 * loader has little room for thread-local data, of which a user keeps only a pointer to this. */
#ifndef OCP_BASE_THREAD_MEMORY_H
#define OCP_BASE_THREAD_MEMORY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

/* Static; `release` is the only member to initialise. */
typedef struct ocp_thread_memory {
  void (*release)(void *memory);
  bool has_key;
  pthread_key_t key;
} ocp_thread_memory;

/* New zeroed memory of the calling thread, which must have none of this kind; NULL: out of memory. */
void *ocp_thread_memory_make(ocp_thread_memory *kind, size_t bytes);

#endif
