/* OrtSyncStreamImpl over ocp_stream. */
#ifndef OCP_ORT_DATA_STREAM_H
#define OCP_ORT_DATA_STREAM_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"

/* ---- slots of OrtEpFactory ---- */
bool ocp_ort_is_stream_aware(const OrtEpFactory *factory); /* always true */
OrtStatus *ocp_ort_create_sync_stream(OrtEpFactory *factory, const OrtMemoryDevice *memory_device,
                                      const OrtKeyValuePairs *options, OrtSyncStreamImpl **out);

/* For OrtEp::Sync: waits until all work enqueued on the device's streams has finished. */
OrtStatus *ocp_ort_synchronize_device(ocp_device *device);

/* ---- for other files of ort/ ---- */
/* Makes ORT's view of the stream. The view takes over one of the caller's references, and releases it when ORT releases
 * the view. NULL with the error. */
OrtSyncStreamImpl *ocp_ort_stream_view(ocp_stream *stream, ocp_error *error);
/* Returns the ocp_stream behind ORT's stream; NULL if ORT's stream is NULL or the plugin did not make it. */
ocp_stream *ocp_ort_stream(OrtSyncStream *stream);
/* Finds the stream on which a kernel must enqueue its work. *out is NULL when ORT runs the kernel without a stream:
 * then use a borrowed stream and wait for it. */
int ocp_ort_stream_of_context(const OrtKernelContext *context, const ocp_device *device, ocp_stream **out,
                              ocp_error *error);

/* Begin and end work for which ORT may give no stream. Such work goes to a borrowed stream, after all work whose
 * results the calling thread can have, and ocp_ort_end_work waits for it. */
typedef struct ocp_work {
  ocp_stream *stream; /* NULL: ocp_ort_begin_work has failed or was not called */
  bool borrowed;
} ocp_work;
int ocp_ort_begin_work(ocp_work *work, ocp_device *device, ocp_error *error);
/* Does not overwrite an error that `error` holds. */
void ocp_ort_end_work(const ocp_work *work, ocp_error *error);

#endif
