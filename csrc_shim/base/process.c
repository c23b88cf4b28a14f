#include "base/process.h"

#include <pthread.h>
#include <stddef.h>

atomic_bool ocp_forked;
static atomic_bool shutting_down;

static void after_fork_in_child(void) { atomic_store(&ocp_forked, true); }

void ocp_watch_forks(void) {
  static atomic_bool watching;
  /* pthread_atfork fails only when memory is exhausted; nothing else works then either. */
  if (!atomic_exchange(&watching, true))
    (void)pthread_atfork(NULL, NULL, after_fork_in_child);
}

bool ocp_is_shutting_down(void) { return atomic_load_explicit(&shutting_down, memory_order_relaxed); }

void ocp_shut_down(void) { atomic_store(&shutting_down, true); }
