/* The worker threads that run blocks in parallel with the launching thread. They start on the first launch that is
 * large enough, live as long as the process, and take work from any number of launches at once. */
#include "emulator/blocks/workers.h"

#include <signal.h>
#include <stdlib.h>

#include "emulator/state.h"

typedef struct job {
  emu_range_fn run;
  void *context;
  uint64_t count, chunk;
  _Atomic uint64_t next;     /* first index that no thread has taken */
  uint32_t helpers, allowed; /* workers that run the job, and their maximum; guarded by lock */
  struct job *after;
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static job *jobs;            /* jobs in progress */
static uint32_t num_workers; /* workers that have started */
static uint32_t idle;

static void work_on(job *job) {
  while (true) {
    uint64_t first = atomic_fetch_add_explicit(&job->next, job->chunk, memory_order_relaxed);
    if (first >= job->count)
      return;
    uint64_t last = first + job->chunk < job->count ? first + job->chunk : job->count;
    job->run(job->context, first, last);
  }
}

static void *worker(void *unused) {
  (void)unused;
  pthread_mutex_lock(&lock);
  while (true) {
    job *job = jobs;
    while (job &&
           (job->helpers >= job->allowed || atomic_load_explicit(&job->next, memory_order_relaxed) >= job->count))
      job = job->after;
    if (!job) {
      idle++;
      pthread_cond_wait(&work, &lock);
      idle--;
      continue;
    }
    job->helpers++;
    pthread_mutex_unlock(&lock);
    work_on(job);
    pthread_mutex_lock(&lock);
    if (--job->helpers == 0)
      pthread_cond_broadcast(&left);
  }
  return NULL;
}

/* Starts emu.threads - 1 workers: the calling thread runs blocks too. Called with the lock held. */
static void start_workers(void) {
  uint32_t wanted = emu.threads - 1;
  if (num_workers >= wanted)
    return;
  sigset_t all, before;
  sigfillset(&all); /* the application's own threads receive its signals */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  for (; num_workers < wanted; num_workers++) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, worker, NULL))
      break; /* works with fewer workers: the results are the same */
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void emu_pool_run(emu_range_fn run, void *context, uint64_t count, uint64_t chunk) {
  job own = {.run = run, .context = context, .count = count, .chunk = chunk, .allowed = emu.threads - 1};
  pthread_mutex_lock(&lock);
  start_workers();
  own.after = jobs;
  jobs = &own;
  if (idle)
    pthread_cond_broadcast(&work);
  pthread_mutex_unlock(&lock);
  work_on(&own);
  pthread_mutex_lock(&lock);
  for (job **link = &jobs; *link; link = &(*link)->after)
    if (*link == &own) {
      *link = own.after;
      break;
    }
  while (own.helpers)
    pthread_cond_wait(&left, &lock);
  pthread_mutex_unlock(&lock);
}
