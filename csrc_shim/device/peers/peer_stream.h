/* Peer streams: the streams of one Run on several devices, the order between these streams, and copies between devices.
 */
#ifndef OCP_DEVICE_PEERS_PEER_STREAM_H
#define OCP_DEVICE_PEERS_PEER_STREAM_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

/* Finds the stream on `device` for the work that Runs on `stream` enqueue there: `stream` itself if it is on `device`,
 * else its peer stream. The first call creates the peer stream, which lives as long as `stream`. Any thread may call
 * this. */
int ocp_peer_stream(ocp_stream *stream, ocp_device *device, ocp_stream **out, ocp_error *error);
/* Makes the work that `later` gets from now on wait, on its device, for all work that `earlier` has now. */
int ocp_peer_follow(ocp_stream *later, ocp_stream *earlier, ocp_error *error);
/* Copies device memory of `from`'s device, after the present work of `from`, to memory of `to`'s device, before the
 * later work of both streams. So the caller can free the source on `from`, and the destination on `to`, at once. If the
 * driver cannot order the copy before the later work of `from`, the host waits for the copy. */
int ocp_peer_copy(ocp_stream *to, CUdeviceptr dst, ocp_stream *from, CUdeviceptr src, size_t bytes, ocp_error *error);
/* Waits on the host for the peer streams of `stream`. */
int ocp_peer_synchronize(ocp_stream *stream, ocp_error *error);

#endif
