/* CUDA streams: created by the plugin or adopted from the application, reference counted, borrowed from a pool,
 * captured, and looked up by handle. */
#ifndef OCP_DEVICE_STREAM_H
#define OCP_DEVICE_STREAM_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream_state.h"
#include "driver/driver.h"

/* Advice for the messages of Runs that fail because a CUDA graph cannot capture them. */
#define OCP_WITHOUT_CAPTURE                                                                                            \
  "Run with gpu_graph_id=-1, or without enable_cuda_graph, or outside of the application's capture"

int ocp_stream_create(ocp_device *device, ocp_stream **out, ocp_error *error);
/* Returns the ocp_stream of the application's CUDA stream `handle` (NULL: the legacy default stream); all callers get
 * the same object. Fails if the driver does not know the handle, or if the stream belongs to another context than the
 * device's primary one. */
int ocp_stream_adopt(ocp_device *device, CUstream handle, ocp_stream **out, ocp_error *error);
/* Adds a reference, which must be released; returns the stream. */
ocp_stream *ocp_stream_share(ocp_stream *stream);
/* Drops a reference. The last call waits for the stream's work and destroys the stream. */
void ocp_stream_release(ocp_stream *stream);
int ocp_stream_synchronize(ocp_stream *stream, ocp_error *error);
/* Synchronizes the stream, for a caller that has entered the device. */
int ocp_stream_wait(ocp_stream *stream, ocp_error *error);
/* Asks the driver whether all work of the stream has finished (cuStreamQuery); if so, marks it as finished. */
void ocp_stream_query(ocp_stream *stream);
/* Whether the stream is being captured, by the plugin, ORT or the application. */
bool ocp_stream_is_captured(const ocp_stream *stream);
/* Whether ORT or the application captures the stream. Asks the driver only for streams of the application. */
bool ocp_stream_is_recorded(const ocp_stream *stream);
/* Ends the capture of the stream. The caller holds the exclusive turn. *graph: the captured graph; NULL if this fails.
 * If the driver fails and the capture stays open, this function tries once more to end it, and ocp_stream_close_capture
 * tries again before a Run uses the stream. */
CUresult ocp_stream_end_capture(ocp_stream *stream, CUgraph *graph);
int ocp_stream_close_capture(ocp_stream *stream, ocp_error *error);
/* Turns are a readers-writer lock of a stream that several threads may share: a Run takes a shared turn, a capture an
 * exclusive one (`alone`), because it records everything that is enqueued on the stream. An exclusive turn waits until
 * all other turns have ended, and keeps new ones out. ocp_stream_try_turn takes a shared turn without waiting; it fails
 * during an exclusive turn. */
void ocp_stream_take_turn(ocp_stream *stream, bool alone);
bool ocp_stream_try_turn(ocp_stream *stream);
void ocp_stream_end_turn(ocp_stream *stream);
/* Finds the ocp_stream of this CUstream on the device (NULL: on any device); NULL if there is none. Default streams
 * have the same handle on every device. */
ocp_stream *ocp_stream_of_handle(const ocp_device *device, void *handle);
/* Finds the ocp_stream whose slot `slot` holds `state`; NULL if there is none. Does not dereference `state`. */
ocp_stream *ocp_stream_of_state(ocp_stream_slot_id slot, const void *state);
/* Lend a stream of the pool, for work whose caller names no stream, and take it back. A returned stream is kept for the
 * next borrower, which is cheaper than creating one. */
int ocp_stream_borrow(ocp_device *device, ocp_stream **out, ocp_error *error);
void ocp_stream_return(ocp_stream *stream);
/* Destroys the pool's idle streams. */
void ocp_pool_release_idle_streams(struct ocp_pool *pool);

#endif
