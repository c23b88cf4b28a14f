/* The list of all streams, and the entry of every call on a stream. */
#ifndef OCP_EMULATOR_STREAM_LIST_H
#define OCP_EMULATOR_STREAM_LIST_H

#include "driver/driver.h"
#include "emulator/state.h"

/* The stream of a handle: NULL and CU_STREAM_LEGACY are the device's null stream. */
static inline CUstream emu_stream_of(emu_device *device, CUstream stream) {
  return stream && stream != CU_STREAM_LEGACY ? stream : &device->legacy;
}
/* The streams that StreamCreate made and that are alive or still have work. The list's lock and emu_order (queue.h)
 * guard them: a thread that holds either may read, a thread that holds both may write. */
extern struct CUstream_st *emu_streams;
void emu_streams_lock(void);
void emu_streams_unlock(void);
/* Takes the stream from the list and frees it. */
void emu_stream_free(CUstream stream);
/* Entry of calls on a stream, with emu_stream_of. */
CUresult emu_enter_stream(CUstream *stream);
/* Stores a sticky error of an operation. */
void emu_note_error(emu_device *device, CUresult result);

#endif
