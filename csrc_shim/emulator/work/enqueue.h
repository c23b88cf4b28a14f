/* Enqueues operations and graph launches: runs them at once or queues them. An operation on a capturing stream becomes
 * a node of a graph; a graph launch on such a stream fails. */
#ifndef OCP_EMULATOR_WORK_ENQUEUE_H
#define OCP_EMULATOR_WORK_ENQUEUE_H

#include "driver/driver.h"
#include "emulator/op.h"
#include "emulator/work/replay.h"

CUresult emu_enqueue(CUstream stream, const emu_op *op);
/* Takes ownership of the replay. */
CUresult emu_enqueue_replay(CUstream stream, emu_replay *replay);

#endif
