/* Work of one Run on several devices: streams that belong together, order between them, and copies between devices. */
#ifndef OCP_DEVICE_PEERS_PEER_STREAM_H
#define OCP_DEVICE_PEERS_PEER_STREAM_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

/* Finds the stream on `device` for the work that Runs on `stream` do there; `stream` itself on its own device. The
 * first call creates it. It lives as long as `stream`. Any thread may call this. */
int ocp_peer_stream(ocp_stream *stream, ocp_device *device, ocp_stream **out, ocp_error *error);
/* Makes the work that `later` gets from now on wait, on its device, for all work that `earlier` has now. */
int ocp_peer_follow(ocp_stream *later, ocp_stream *earlier, ocp_error *error);
/* Copies device memory of `from`'s device, after the present work of `from`, to memory of `to`'s device, before the
 * later work of both streams. So both streams can free the memory that they own. If the copy cannot be ordered before
 * later work, waits for it. */
int ocp_peer_copy(ocp_stream *to, CUdeviceptr dst, ocp_stream *from, CUdeviceptr src, size_t bytes, ocp_error *error);
/* Waits for the streams that ocp_peer_stream has made for this one. */
int ocp_peer_synchronize(ocp_stream *stream, ocp_error *error);

#endif
