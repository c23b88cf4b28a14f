/* Pipeline parallelism: a cluster that is split into stages. Each stage is a cluster on one of several devices.
 *
 *     inputs (device 0) -> stage 0 (device 0) -> tensors -> stage 1 (device 1) -> tensors -> ... -> outputs (device 0)
 *
 * A tensor is copied at most once to each other device that reads it, from the device that has computed it. Each device
 * has a stream for the Run (device/peers/peer_stream.h). Events order the streams, so the host waits for no copy. Runs
 * of several threads have different streams: while one Run is in stage 1, another one can be in stage 0. A stage is an
 * ordinary cluster, with its own plans, instances and CUDA graphs. */
#ifndef OCP_RUN_PIPELINE_H
#define OCP_RUN_PIPELINE_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"
#include "run/cluster.h"
#include "run/executor.h"
#include "run/instance/input.h"

/* A stage. Values are numbered: the inputs of the node, then the tensors that stages compute, in the order of the
 * stages. */
typedef struct ocp_pipeline_stage {
  ocp_cluster *cluster;
  uint32_t device; /* index of the stage's device in ocp_pipeline_spec.devices */
  uint32_t num_sources, num_results;
  const uint32_t *sources; /* by input of the cluster: its value, an input of the node or a result of earlier stages */
  const uint32_t *only_shapes; /* by input: 1 if the cluster reads only its shape, so that it is not copied; else 0 */
  const uint32_t *results;     /* by output of the cluster: its value */
} ocp_pipeline_stage;

typedef struct ocp_pipeline_spec {
  uint32_t num_devices, num_stages, num_inputs, num_values, num_outputs;
  struct ocp_device *const *devices; /* the first one has the inputs and outputs of the node */
  const ocp_pipeline_stage *stages;
  const uint32_t *types;   /* ONNXTensorElementDataType of each value after the inputs */
  const uint32_t *outputs; /* the value of each output of the node */
} ocp_pipeline_spec;

typedef struct ocp_pipeline ocp_pipeline;

/* Makes a pipeline; NULL with the error. Copies the arrays of `spec`. The caller keeps the clusters until
 * ocp_pipeline_release. */
ocp_pipeline *ocp_pipeline_create(const ocp_pipeline_spec *spec, ocp_error *error);
void ocp_pipeline_release(ocp_pipeline *pipeline);
uint32_t ocp_pipeline_num_inputs(const ocp_pipeline *pipeline);
/* Like ocp_cluster_run. `stream` is one of the first device. If an output shares memory with an input or with another
 * output, the Run writes the output after all stages. */
int ocp_pipeline_run(const ocp_pipeline *pipeline, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                     ocp_output_fn output, void *output_context, ocp_error *error);

#endif
