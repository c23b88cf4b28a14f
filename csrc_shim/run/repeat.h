/* A loop over a cluster, for nodes such as GreedySearch: three clusters that share device tensors, the states.
 *
 *     inputs -> first -> states -> step -> states -> ... -> last -> outputs
 *
 * `step` repeats as long as the first state, a flag, is set. The host reads the flag before each iteration; the other
 * states stay on the device. Each iteration calls ocp_cluster_run for `step`, so shapes may change between iterations,
 * and an iteration with the shapes of an earlier one finds its instance in the cache. */
#ifndef OCP_RUN_REPEAT_H
#define OCP_RUN_REPEAT_H

#include "base/error.h"
#include "device/device.h"
#include "device/stream.h"
#include "run/cluster.h"
#include "run/executor.h"
#include "run/instance/input.h"

/* A cluster of the loop. sources: for each input of the cluster, the index of a state, or num_states + the index of an
 * input of the node. results: the states that the cluster's outputs replace, each at most once; other states keep their
 * values. */
typedef struct ocp_repeat_part {
  ocp_cluster *cluster;
  uint32_t num_sources, num_results;
  const uint32_t *sources, *results;
} ocp_repeat_part;

typedef struct ocp_repeat_spec {
  ocp_repeat_part first, step, last; /* `last` has no results: its outputs are those of the node, in order */
  uint32_t num_inputs, num_states;
  const uint32_t *state_types; /* ONNXTensorElementDataType of each state; bool for the first, the flag */
} ocp_repeat_spec;

typedef struct ocp_repeat ocp_repeat;

/* Makes a loop; NULL with the error. Copies the arrays of `spec`. The caller keeps the clusters until
 * ocp_repeat_release. */
ocp_repeat *ocp_repeat_create(ocp_device *device, const ocp_repeat_spec *spec, ocp_error *error);
void ocp_repeat_release(ocp_repeat *repeat);
uint32_t ocp_repeat_num_inputs(const ocp_repeat *repeat);
/* Like ocp_cluster_run, except that the host waits for each iteration. */
int ocp_repeat_run(const ocp_repeat *repeat, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                   ocp_output_fn output, void *output_context, ocp_error *error);

#endif
