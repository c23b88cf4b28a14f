/* Uploads of weights: copies from pinned host memory to device memory of the Run, on a copy stream. They overlap with
 * the records between an upload and its await.
 *
 *     Run's stream   --record----ready----record--------await----record that reads the weight--
 *                                  \                   /
 *     copy stream                   `---upload----done
 *
 * An upload starts after all earlier records, because these may still read the memory that it writes. Uploads run one
 * after the other, in the order of the plan.
 *
 * Each stream of Runs has a copy stream. If several threads enqueue Runs on one stream at once, one of them uses its
 * copy stream, and the others borrow copy streams from the device. A Run that is captured has its stream exclusively,
 * and so its copy stream, which is part of the capture until the capture ends. */
#ifndef OCP_RUN_INSTANCE_UPLOADS_H
#define OCP_RUN_INSTANCE_UPLOADS_H

#include <stdatomic.h>

#include "base/error.h"
#include "device/stream.h"
#include "driver/driver.h"

struct ocp_upload_events;

/* The uploads of a segment while it is enqueued; initialize only `run` and `most_in_flight`. */
typedef struct ocp_uploads {
  ocp_stream *run;          /* the Run's stream */
  uint32_t most_in_flight;  /* maximum number of uploads between their issue and their await */
  uint32_t issued, awaited; /* numbers of uploads so far */
  bool is_level;       /* whether the copy stream waits for all records enqueued so far; the caller clears it after each
                          record that is not an upload */
  atomic_bool *in_use; /* marks the copy stream of `run` as in use; NULL: `copies` is borrowed */
  ocp_stream *copies;  /* the copy stream; NULL: no upload yet */
  struct ocp_upload_events *events;
} ocp_uploads;

/* Enqueues a copy of `bytes` bytes from pinned host memory at `from` to device memory at `to`, on the copy stream. */
int ocp_uploads_copy(ocp_uploads *uploads, CUdeviceptr to, uint64_t from, size_t bytes, ocp_error *error);
/* Makes later work of the Run's stream wait for the earliest upload that has not been awaited. */
CUresult ocp_uploads_await(ocp_uploads *uploads);
/* Makes later work of the Run's stream wait for all uploads that have not been awaited (an error may have kept the Run
 * from awaiting them), and gives the copy stream back. Must be called once. */
void ocp_uploads_end(ocp_uploads *uploads);

#endif
