#include "base/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t users;
static _Atomic uint32_t counted;
static struct sigaction former; /* the application's handler, which does not change while `users` is above 0 */

static void count(int number, siginfo_t *info, void *context) {
  atomic_fetch_add(&counted, 1);
  if (former.sa_flags & SA_SIGINFO)
    former.sa_sigaction(number, info, context);
  else
    former.sa_handler(number);
}

static bool is_ours(const struct sigaction *action) {
  return action->sa_flags & SA_SIGINFO && action->sa_sigaction == count;
}

void ocp_interrupts_begin(void) {
  pthread_mutex_lock(&lock);
  struct sigaction current;
  if (users++ == 0 && sigaction(SIGINT, NULL, &current) == 0 && !is_ours(&current) &&
      (current.sa_flags & SA_SIGINFO || (current.sa_handler != SIG_DFL && current.sa_handler != SIG_IGN))) {
    former = current;
    struct sigaction own = current;
    own.sa_flags |= SA_SIGINFO;
    own.sa_sigaction = count;
    sigaction(SIGINT, &own, NULL);
  }
  pthread_mutex_unlock(&lock);
}

/* A handler that the application has set in the meantime stays; it may call `count` as its predecessor. */
void ocp_interrupts_end(void) {
  pthread_mutex_lock(&lock);
  struct sigaction current;
  if (--users == 0 && sigaction(SIGINT, NULL, &current) == 0 && is_ours(&current))
    sigaction(SIGINT, &former, NULL);
  pthread_mutex_unlock(&lock);
}

uint32_t ocp_interrupts(void) { return atomic_load(&counted); }
