/* Streams, events and captures: what their files know of each other. */
#ifndef OCP_EMULATOR_STREAM_H
#define OCP_EMULATOR_STREAM_H

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/op.h"
#include "emulator/state.h"

/* One recording of an event: a later one of the same event does not change what waits for this one. */
typedef struct emu_record {
  atomic_int references;
  atomic_bool done;
  double time;      /* milliseconds of the host's clock */
  emu_clock *clock; /* checking mode: what happened before */
} emu_record;
/* NULL, the record of an event that was never recorded, is done. */
bool emu_record_is_done(const emu_record *record);
void emu_record_finish(emu_record *record);
emu_record *emu_record_share(emu_record *record);
void emu_record_release(emu_record *record);

struct CUevent_st {
  unsigned flags;
  emu_record *record;          /* the last one; NULL: never recorded */
  struct emu_capture *capture; /* the capture that the last record belongs to */
  struct CUgraphNode_st **nodes;
  uint32_t num_nodes;      /* of the capture, that stood before the record */
  struct CUevent_st *next; /* of the capture */
};

/* ---- a graph on its way through a stream ---- */
typedef struct emu_replay emu_replay;
/* Runs one node whose dependencies have run; in order, or as random picks. False: none is left, or one failed. */
bool emu_replay_step(emu_replay *replay, const emu_clock *clock, uint32_t (*random)(uint32_t below));
/* Runs all of it at once. An executable graph runs once at a time, in the order of its launches. */
CUresult emu_replay_run(emu_replay *replay, const emu_clock *clock);
/* The same for launches that are kept, under emu_order: one was queued, and whether those before it have run. */
void emu_replay_queued(emu_replay *replay);
bool emu_replay_is_next(const emu_replay *replay);
CUresult emu_replay_result(const emu_replay *replay);
void emu_replay_free(emu_replay *replay);
/* Takes the replay over. */
CUresult emu_enqueue_replay(CUstream stream, emu_replay *replay);

/* ---- captures; called with the stream's lock or, in adversarial mode, the order held ---- */
/* Whether operations of the stream become nodes; *result is the error where they are not allowed at all. */
bool emu_is_capturing(CUstream stream, CUresult *result);
CUresult emu_capture_op(CUstream stream, const emu_op *op);
CUresult emu_capture_record(CUstream stream, CUevent event);
/* Whether the wait is a matter of captures, and then its result. */
bool emu_capture_wait(CUstream stream, CUevent event, CUresult *result);
void emu_capture_forget(CUevent event);
/* ---- captures; called without ---- */
void emu_capture_leave(CUstream stream); /* the stream is about to be destroyed */
/* The error of a call that may wait for the device, such as an allocation, where a capture forbids it. */
CUresult emu_capture_unsafe(void);
/* The error of waiting for the stream, or for NULL of waiting for all, where a capture forbids it. */
CUresult emu_capture_forbids(CUstream stream);
CUresult emu_capture_event(CUevent event);
/* For the end of a capture: visits the streams, which must be locked. */
void emu_streams_lock(void);
void emu_streams_unlock(void);
void emu_streams_leave(const struct emu_capture *capture);
void emu_capture_leave_stream(CUstream stream, const struct emu_capture *capture);

/* ---- streams ---- */
CUresult emu_enqueue(CUstream stream, const emu_op *op);
/* The stream of a handle: NULL and CU_STREAM_LEGACY are the device's null stream. */
static inline CUstream emu_stream_of(emu_device *device, CUstream stream) {
  return stream && stream != CU_STREAM_LEGACY ? stream : &device->legacy;
}
/* The streams that StreamCreate made and that are alive or still have work. The list's lock and emu_order guard them: a
 * thread that holds either may read, a thread that holds both may write. */
extern struct CUstream_st *emu_streams;
void emu_stream_free(CUstream stream);
/* Entry of calls on a stream, with emu_stream_of. */
CUresult emu_enter_stream(CUstream *stream);
/* Keeps a sticky error of an operation. */
void emu_note_error(emu_device *device, CUresult result);

#endif
