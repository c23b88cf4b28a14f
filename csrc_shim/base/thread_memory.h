/* Heap memory per thread: allocated on the thread's first request, released when the thread ends. glibc reserves little
 * thread-local storage for libraries that dlopen loads, so a thread-local variable of this library holds only a pointer
 * to such memory. */
#ifndef OCP_BASE_THREAD_MEMORY_H
#define OCP_BASE_THREAD_MEMORY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

/* One kind of per-thread memory. Define it as a static variable that initializes `release` only. */
typedef struct ocp_thread_memory {
  void (*release)(void *memory);
  bool has_key;
  pthread_key_t key;
} ocp_thread_memory;

/* Allocates zeroed memory for the calling thread; NULL: out of memory. A thread must call it at most once per kind. */
void *ocp_thread_memory_make(ocp_thread_memory *kind, size_t bytes);

#endif
