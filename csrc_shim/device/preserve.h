/* Keeps what a Run changes of the memory that it reads, for Runs that are repeated.
 *
 * ONNX Runtime repeats the first Run of a session that captures CUDA graphs. A Run that has a state in one memory as
 * input and output would step it each time. So such a Run notes what it reads. Before it writes over that, it saves it,
 * and the end of the Run puts it back.
 *
 * Only memory that something outside the Run owns is noted: what the Run has written before is its own, and may be
 * anybody's when the Run has ended. */
#ifndef OCP_DEVICE_PRESERVE_H
#define OCP_DEVICE_PRESERVE_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

/* Memory that a Run has read or written, in any order. */
typedef struct ocp_touched {
  struct ocp_touched *next;
  uint64_t start, end;
  uint64_t copy; /* what was there before; 0: nothing has changed it */
  bool written;
} ocp_touched;

typedef struct ocp_preserved {
  ocp_device *device;
  ocp_touched *touched;
} ocp_preserved;

/* The calling thread's Run on the device is one that is repeated, until ocp_preserve_end or ocp_preserve_forget. */
void ocp_preserve_begin(ocp_preserved *preserved, ocp_device *device);
/* The calling thread is in no such Run, even if the one before did not end. */
void ocp_preserve_forget(void);
/* Puts back what the Run changed, on its stream, and frees the copies. */
int ocp_preserve_end(ocp_preserved *preserved, ocp_stream *stream, ocp_error *error);
/* Frees the copies of a Run that nobody ended; its memory may be somebody else's. */
void ocp_preserve_drop(ocp_preserved *preserved);

/* ---- for code that enqueues ---- */
/* Whether the calling thread is in a Run on the device that is repeated. */
bool ocp_preserve_is_wanted(const ocp_device *device);
/* What is enqueued next reads memory. */
int ocp_preserve_reads(uint64_t address, uint64_t bytes, ocp_error *error);
/* What is enqueued next on the stream writes memory. `kept`: in these very bytes it leaves what the Run reads there. */
int ocp_preserve_writes(uint64_t address, uint64_t bytes, bool kept, ocp_stream *stream, ocp_error *error);

#endif
