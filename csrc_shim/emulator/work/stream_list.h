/* The list of all streams, and the checks at the start of each call on a stream. */
#ifndef OCP_EMULATOR_WORK_STREAM_LIST_H
#define OCP_EMULATOR_WORK_STREAM_LIST_H

#include "driver/driver.h"
#include "emulator/state.h"

/* Returns the stream of a handle: NULL and CU_STREAM_LEGACY are the device's null stream. */
static inline CUstream emu_stream_of(emu_device *device, CUstream stream) {
  return stream && stream != CU_STREAM_LEGACY ? stream : &device->legacy;
}
/* The list of the streams that StreamCreate made and that are alive or still have work. A thread that holds the list's
 * lock or emu_order (queue.h) may read the list; a thread that holds both may change it. */
extern struct CUstream_st *emu_streams;
void emu_streams_lock(void);
void emu_streams_unlock(void);
/* Takes the stream from the list and frees it. */
void emu_stream_free(CUstream stream);
/* Makes the checks of emu_enter for a call on a stream, and replaces the handle *stream by emu_stream_of. */
CUresult emu_enter_stream(CUstream *stream);
/* Makes `result` the device's sticky error if it is an illegal address or a launch failure, unless the device has a
 * sticky error already. */
void emu_note_error(emu_device *device, CUresult result);

#endif
