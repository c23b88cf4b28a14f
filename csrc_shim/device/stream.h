/* CUDA streams: created here or adopted from the application, reference counted, borrowed from a pool, captured, and
 * looked up by handle. */
#ifndef OCP_DEVICE_STREAM_H
#define OCP_DEVICE_STREAM_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream_state.h"
#include "driver/driver.h"

int ocp_stream_create(ocp_device *device, ocp_stream **out, ocp_error *error);
/* The application's stream with that handle (NULL: the default stream); every caller gets the same object.
 * Fails if the driver does not know the handle, or if the stream is of a context other than the device's primary one.
 */
int ocp_stream_adopt(ocp_device *device, CUstream handle, ocp_stream **out, ocp_error *error);
/* Adds a reference, which must be released; returns the stream. */
ocp_stream *ocp_stream_share(ocp_stream *stream);
/* Drops a reference. The last one waits for the stream's work and destroys the stream. */
void ocp_stream_release(ocp_stream *stream);
int ocp_stream_synchronize(ocp_stream *stream, ocp_error *error);
/* ocp_stream_synchronize, for a caller that has entered the device. */
int ocp_stream_wait(ocp_stream *stream, ocp_error *error);
/* Asks the driver whether all its work has finished. */
void ocp_stream_query(ocp_stream *stream);
/* Whether the driver captures it, for us or for the application. */
bool ocp_stream_is_captured(const ocp_stream *stream);
/* Ends the capture of the stream, in a turn alone: its graph, or NULL and the error. If the capture stays
 * open, it is tried once more at once, and again before a Run uses the stream. */
CUresult ocp_stream_end_capture(ocp_stream *stream, CUgraph *graph);
int ocp_stream_close_capture(ocp_stream *stream, ocp_error *error);
/* A Run's turn on a stream that several threads share. `alone` waits until no other turn is left, and keeps others out,
 * since a capture takes in everything that is enqueued on the stream. The try does not wait; it fails during a turn
 * alone. */
void ocp_stream_take_turn(ocp_stream *stream, bool alone);
bool ocp_stream_try_turn(ocp_stream *stream);
void ocp_stream_end_turn(ocp_stream *stream);
/* Our stream of a device, or of any, for a raw handle; NULL when there is none. Default streams have the same handle on
 * every device. */
ocp_stream *ocp_stream_of_handle(const ocp_device *device, void *handle);
/* Our stream whose slot holds the state; NULL when there is none. The function does not look at what the state points
 * to. */
ocp_stream *ocp_stream_of_state(ocp_stream_slot_id slot, const void *state);
/* Takes a stream of the pool, for work whose caller names none. A returned stream waits for the next borrower, which is
 * cheaper than to create one. */
int ocp_stream_borrow(ocp_device *device, ocp_stream **out, ocp_error *error);
void ocp_stream_return(ocp_stream *stream);
/* Destroys the pool's idle streams. */
void ocp_pool_release_idle_streams(struct ocp_pool *pool);

#endif
