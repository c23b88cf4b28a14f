/* Copy-on-write snapshot of a Run's inputs, so that the Run can be repeated with the same result.
 *
 * ONNX Runtime repeats the first Run of a session that captures CUDA graphs. If the application binds one buffer as
 * input and output (a KV cache, a state), each repetition would advance that state. So a repeated Run records the
 * ranges that it reads, copies a range before it overwrites it, and restores the copies when it ends.
 *
 * Only ranges that the Run reads before it writes them are saved: the inputs. A range that the Run wrote first is
 * scratch memory: after the Run it may belong to another Run, which a restoring copy would damage. */
#ifndef OCP_DEVICE_MEMORY_PRESERVE_H
#define OCP_DEVICE_MEMORY_PRESERVE_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

/* A range of memory that the Run has read or written. */
typedef struct ocp_touched {
  struct ocp_touched *next;
  uint64_t start, end;
  uint64_t copy; /* device address of the saved contents; 0: not overwritten yet */
  bool written;
} ocp_touched;

typedef struct ocp_preserved {
  ocp_device *device;
  ocp_touched *touched;
} ocp_preserved;

/* Starts recording for the calling thread's Run on the device, until ocp_preserve_end or ocp_preserve_forget. */
void ocp_preserve_begin(ocp_preserved *preserved, ocp_device *device);
/* Stops recording on the calling thread, whose previous Run may never have called ocp_preserve_end. */
void ocp_preserve_forget(void);
/* Enqueues the restoring copies on the Run's stream, and frees the saved contents. */
int ocp_preserve_end(ocp_preserved *preserved, ocp_stream *stream, ocp_error *error);
/* Frees the saved contents of a Run that failed, without restoring: other Runs may own its memory by now. */
void ocp_preserve_drop(ocp_preserved *preserved);

/* ---- for code that enqueues work ---- */
/* Whether the calling thread records a Run on the device. */
bool ocp_preserve_is_wanted(const ocp_device *device);
/* Records that the work enqueued next reads the range. */
int ocp_preserve_reads(uint64_t address, uint64_t bytes, ocp_error *error);
/* Records that the work enqueued next on the stream writes the range, and first saves the recorded inputs that overlap
 * it. `kept`: if an input has exactly this range, the work changes none of the bytes that the Run reads (for example,
 * it appends rows), so the input is not saved. */
int ocp_preserve_writes(uint64_t address, uint64_t bytes, bool kept, ocp_stream *stream, ocp_error *error);

#endif
