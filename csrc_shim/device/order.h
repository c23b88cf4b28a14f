/* Tracks the progress of a device's streams by sequence numbers (pool.h), without driver calls. */
#ifndef OCP_DEVICE_ORDER_H
#define OCP_DEVICE_ORDER_H

#include "device/device.h"
#include "device/pool.h"
#include "device/stream_state.h"

/* Records that work was enqueued on the stream. Code that enqueues work must call this function before memory that the
 * work uses can be freed with a NULL stream. ocp_device_free with this stream records the work as well. */
void ocp_stream_enqueued(ocp_stream *stream);
/* Called at the start and end of each Run, on its thread. Until the end, no other thread can have results of the Run,
 * so ocp_device_settle on another thread need not wait for it. `waited`: the host has waited for the Run's work. */
void ocp_run_started(void);
void ocp_run_ended(ocp_device *device, bool waited);

/* Returns the sequence number of the stream's latest work. */
uint64_t ocp_stream_position(const ocp_stream *stream);
/* Whether all work of the stream is known to be finished; makes no driver call. */
bool ocp_stream_is_idle(const ocp_stream *stream);
/* Mark all work of a stream up to sequence number `up_to` as finished. ocp_stream_completed finds the stream by its id,
 * and does nothing if the stream no longer exists. */
void ocp_stream_set_completed(ocp_stream *stream, uint64_t up_to);
void ocp_stream_completed(ocp_device *device, uint64_t id, uint64_t up_to);
/* Records that work enqueued on `stream` from now on waits (on the device) for all work up to sequence number `up_to`
 * of the stream with that id. */
void ocp_stream_waits(ocp_stream *stream, uint64_t id, uint64_t up_to);
/* Whether work enqueued on `stream` from now on runs after all work up to sequence number `up_to` of the stream with
 * that id. */
bool ocp_stream_comes_after(const ocp_stream *stream, uint64_t id, uint64_t up_to);

/* ---- called with the pool's lock held ---- */
/* Records that work was enqueued on the stream. */
void ocp_pool_advance(ocp_pool *pool, ocp_stream *stream);
/* Whether work enqueued on `taker` from now on runs after all work up to sequence number `up_to` of the stream with
 * that id (0: of all streams). `taker` NULL: whether that work has finished. */
bool ocp_pool_is_finished(const ocp_pool *pool, uint64_t stream_id, uint64_t up_to, const ocp_stream *taker);
/* Whether the stream has unfinished work whose results the calling thread may use: work of the thread's own Run, of a
 * Run that has ended, or outside of Runs. */
bool ocp_stream_is_known_to_be_busy(const ocp_stream *stream);

#endif
