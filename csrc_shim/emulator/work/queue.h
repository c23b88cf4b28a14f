/* The adversarial mode's queues of deferred operations, which run in a random order that streams and events allow. */
#ifndef OCP_EMULATOR_WORK_QUEUE_H
#define OCP_EMULATOR_WORK_QUEUE_H

#include "driver/driver.h"
#include "emulator/op.h"
#include "emulator/record.h"
#include "emulator/work/replay.h"

/* Guards the records of events and, in adversarial mode, every queue. Taken after the lock of a stream. Callers of the
 * functions below hold it, except for emu_queue_seed and emu_queue_run_all. */
extern pthread_mutex_t emu_order;

/* Seeds the generator of the random order. */
void emu_queue_seed(uint64_t seed);
void emu_queue_run_all(void);
uint32_t emu_random(uint32_t below);
/* Runs the first operation of a random stream that is ready; false: no stream is ready. */
bool emu_queue_run(void);
void emu_queue_drain(CUstream stream);
CUresult emu_queue_op(CUstream stream, const emu_op *op);
CUresult emu_queue_replay(CUstream stream, emu_replay *replay); /* takes ownership of the replay */
CUresult emu_queue_record(CUstream stream, emu_record *record);
CUresult emu_queue_wait(CUstream stream, emu_record *record);

#endif
