/* Queues of deferred operations, which run in a random order that streams, events and semaphores allow. The adversarial
 * mode queues all operations; the inline mode only those behind an unfinished wait for an external semaphore. */
#ifndef OCP_EMULATOR_WORK_QUEUE_H
#define OCP_EMULATOR_WORK_QUEUE_H

#include "driver/driver.h"
#include "emulator/op.h"
#include "emulator/record.h"
#include "emulator/work/replay.h"
#include "emulator/work/timeline.h"

/* Guards the records of events, and every queue. Taken after the lock of a stream. Callers of the functions below hold
 * it, except for emu_queue_seed, emu_queue_run_all and emu_queue_is_empty. */
extern pthread_mutex_t emu_order;

/* Seeds the generator of the random order. */
void emu_queue_seed(uint64_t seed);
void emu_queue_run_all(void);
uint32_t emu_random(uint32_t below);
/* Runs the first operation of a random stream that is ready; false: no stream is ready. */
bool emu_queue_run(void);
/* For a caller that needs work to finish, when no stream is ready. If a stream waits for an external semaphore, or for
 * a graph launch that another thread runs inline, sleeps a moment without emu_order, and returns true; the caller then
 * calls emu_queue_run again. If a wait for a semaphore has lasted longer than the configuration allows, the stream's
 * device is lost. False: nothing is left to wait for. */
bool emu_queue_await(void);
/* Runs the stream's work, and whatever it needs, to the end. May release emu_order meanwhile. */
void emu_queue_drain(CUstream stream);
bool emu_queue_is_empty(void); /* whether no stream has queued items */
/* Whether work that is enqueued on the stream now must be queued behind other queued work. */
bool emu_queue_blocks(CUstream stream);
/* Returns the number of queued waits for, and signals of, external semaphores. */
uint32_t emu_queue_external(void);
CUresult emu_queue_op(CUstream stream, const emu_op *op);
CUresult emu_queue_replay(CUstream stream, emu_replay *replay); /* takes ownership of the replay */
CUresult emu_queue_record(CUstream stream, emu_record *record);
CUresult emu_queue_wait(CUstream stream, emu_record *record);
/* Queue a wait until the timeline has at least this value, or a signal that sets the value. */
CUresult emu_queue_external_wait(CUstream stream, emu_timeline *timeline, uint64_t value);
CUresult emu_queue_external_signal(CUstream stream, emu_timeline *timeline, uint64_t value);
/* Frees the streams of the list (stream_list.h) that were destroyed and have no work left. The caller also holds the
 * list's lock. */
void emu_queue_sweep(void);

#endif
