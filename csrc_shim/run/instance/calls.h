/* Evaluates the records of a plan (launch parameters, grids, addresses), and enqueues them. */
#ifndef OCP_RUN_INSTANCE_CALLS_H
#define OCP_RUN_INSTANCE_CALLS_H

#include "base/error.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "plan/format.h"
#include "run/instance/instance_state.h"

/* Fills the calls of a segment whose registers, sizes and offsets are known. */
int ocp_instance_fill_calls(ocp_instance *instance, uint32_t segment, ocp_error *error);
/* Writes the addresses into the parameters of a segment's calls. The instance's base addresses (of its inputs, outputs
 * and slab) must be set. */
void ocp_instance_set_pointers(ocp_instance *instance, uint32_t segment);
/* Calls ocp_instance_set_pointers, and enqueues a segment's records. */
int ocp_instance_enqueue(ocp_instance *instance, uint32_t segment, ocp_stream *stream, ocp_error *error);
/* Numbers of enqueued records by ocp_record_kind, and the total bytes of the uploads among them. */
typedef struct ocp_record_counts {
  int64_t records[OCP_RECORD_NUM_KINDS], uploaded_bytes;
} ocp_record_counts;
/* Adds the numbers of enqueued launches, copies, uploads, library calls and loops, and the uploaded bytes, to the
 * counters. */
void ocp_count_records(const ocp_record_counts *counts);
/* Finds the device address of the first element that a read-back reads. */
int ocp_instance_locate(const ocp_instance *instance, const ocp_plan_readback *readback, CUdeviceptr *address,
                        ocp_error *error);

#endif
