/* Enqueues operations and graph launches: they run at once, wait in the stream's queue, or become nodes of a capture.
 */
#ifndef OCP_EMULATOR_WORK_ENQUEUE_H
#define OCP_EMULATOR_WORK_ENQUEUE_H

#include "driver/driver.h"
#include "emulator/op.h"
#include "emulator/work/replay.h"

CUresult emu_enqueue(CUstream stream, const emu_op *op);
/* Takes ownership of the replay. */
CUresult emu_enqueue_replay(CUstream stream, emu_replay *replay);

#endif
