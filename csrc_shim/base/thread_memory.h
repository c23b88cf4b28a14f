/* Heap memory per thread: made when the thread first asks for it, released when the thread ends. glibc keeps little
 * room for thread-local variables of libraries that are loaded late, so users keep only a pointer in one. */
#ifndef OCP_BASE_THREAD_MEMORY_H
#define OCP_BASE_THREAD_MEMORY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

/* A kind of per-thread memory: a static variable whose only initialised member is `release`. */
typedef struct ocp_thread_memory {
  void (*release)(void *memory);
  bool has_key;
  pthread_key_t key;
} ocp_thread_memory;

/* Allocates zeroed memory for the calling thread, which must not have any of this kind yet; NULL: out of memory. */
void *ocp_thread_memory_make(ocp_thread_memory *kind, size_t bytes);

#endif
