/* Progress of a device's streams, tracked by sequence numbers (pool.h) without calls of the driver. */
#ifndef OCP_DEVICE_ORDER_H
#define OCP_DEVICE_ORDER_H

#include "device/device.h"
#include "device/pool.h"
#include "device/stream_state.h"

/* Records that work was enqueued on the stream. All code that enqueues calls it, before any memory that the work uses
 * can be freed without naming the stream. ocp_device_free on the stream calls it as well. */
void ocp_stream_enqueued(ocp_stream *stream);
/* Called around each Run, on its thread. Until the Run ends, no other thread can have its results. `waited`: the host
 * has waited for the Run's work. */
void ocp_run_started(void);
void ocp_run_ended(ocp_device *device, bool waited);

/* Returns the sequence number of the stream's latest work. */
uint64_t ocp_stream_position(const ocp_stream *stream);
/* Whether all work of the stream is known to be finished; makes no driver call. */
bool ocp_stream_is_idle(const ocp_stream *stream);
/* Marks all work of a stream up to a sequence number as finished. The second function finds the stream by its id, and
 * does nothing if the stream no longer exists. */
void ocp_stream_set_completed(ocp_stream *stream, uint64_t up_to);
void ocp_stream_completed(ocp_device *device, uint64_t id, uint64_t up_to);
/* Records that work which the stream enqueues from now on waits for another stream's work up to a sequence number.
 */
void ocp_stream_waits(ocp_stream *stream, uint64_t id, uint64_t up_to);
/* Whether work that `stream` enqueues from now on is ordered after all work, up to a sequence number, of the stream
 * with that id. */
bool ocp_stream_comes_after(const ocp_stream *stream, uint64_t id, uint64_t up_to);

/* ---- under the pool's lock ---- */
/* Records that work was enqueued on the stream. */
void ocp_pool_advance(ocp_pool *pool, ocp_stream *stream);
/* Whether work that `taker` enqueues from now on (NULL: work on any stream, or the host at once) is ordered after
 * all work, up to a sequence number, of the stream with that id (0: of all streams). */
bool ocp_pool_is_finished(const ocp_pool *pool, uint64_t stream_id, uint64_t up_to, const ocp_stream *taker);
/* Whether the stream has unfinished work whose results the calling thread can have: work of its own Run, of a Run that
 * has ended, or of no Run. */
bool ocp_stream_is_known_to_be_busy(const ocp_stream *stream);

#endif
