/* Types of the kernels and callbacks that plans refer to by index, and of the function that builds plans. */
#ifndef OCP_RUN_INSTANCE_HANDLES_H
#define OCP_RUN_INSTANCE_HANDLES_H

#include "base/error.h"
#include "driver/driver.h"
#include "run/instance/input.h"

#define OCP_MAX_HOST_INPUTS 256u

typedef struct ocp_cluster ocp_cluster;
typedef struct ocp_stream ocp_stream;

/* A kernel, which plans refer to by its index in the cluster. The caller owns the function (as it owns library
 * problems), and keeps it until the cluster is released. */
typedef struct ocp_kernel_ref {
  CUfunction function;
  const char *name; /* copied */
  uint32_t num_params;
  const uint8_t *params; /* the ocp_param_kind of each parameter; copied */
} ocp_kernel_ref;

/* A callback of a plan, called in each Run: enqueues its computation on the stream. The device's context is current.
 * `pointers`: device addresses, in the order of the record's pointers. `numbers`: the record's numbers. The signature
 * is that of ocp_python.call_back. */
typedef int (*ocp_call_fn)(int64_t handle, uint32_t callback, const uint64_t *pointers, uint32_t num_pointers,
                           const int64_t *numbers, uint32_t num_numbers, ocp_stream *stream, ocp_error *error);

/* Builds and adds the plan that these inputs need, with the signature of ocp_python.build_variant. host_values: the
 * elements of all host inputs as int64, one input after the other. */
typedef int (*ocp_build_fn)(int64_t handle, const ocp_input *inputs, uint32_t num_inputs, const int64_t *host_values,
                            const uint32_t *host_counts, uint32_t num_host_inputs, ocp_error *error);

#endif
