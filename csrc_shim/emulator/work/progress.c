/* Progress of streams with external semaphores. The thread runs queued operations while any are queued (inline mode),
 * or while waits or signals are queued (adversarial mode, whose other work runs only when the program waits). It starts
 * with the first wait or signal that is queued, and lives as long as the process. */
#include "emulator/work/progress.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "emulator/state.h"
#include "emulator/work/queue.h"

/* Time for which the adversarial mode still defers work when a wait or a signal is queued. */
enum { ADVERSARIAL_NANOSECONDS = 3000000 };

static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER; /* used with emu_order */
static bool has_started;

static bool has_work(void) { return emu.config.adversarial ? emu_queue_external() > 0 : !emu_queue_is_empty(); }

static void sleep_unlocked(long nanoseconds) {
  pthread_mutex_unlock(&emu_order);
  nanosleep(&(struct timespec){.tv_nsec = nanoseconds}, NULL);
  pthread_mutex_lock(&emu_order);
}

static void *run(void *unused) {
  (void)unused;
  pthread_mutex_lock(&emu_order);
  while (true) {
    while (!has_work())
      pthread_cond_wait(&wanted, &emu_order);
    if (emu.config.adversarial)
      sleep_unlocked(ADVERSARIAL_NANOSECONDS);
    while (has_work() && (emu_queue_run() || emu_queue_await()))
      sleep_unlocked(1); /* lets other threads enqueue */
  }
  return NULL;
}

bool emu_progress(void) {
  if (!has_started) {
    sigset_t all, before;
    sigfillset(&all); /* the application's own threads receive its signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    has_started = pthread_create(&thread, NULL, run, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (has_started)
      pthread_detach(thread);
  }
  pthread_cond_signal(&wanted);
  return has_started;
}
