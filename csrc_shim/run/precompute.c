#include "run/precompute.h"

#include <string.h>

#include "device/device.h"
#include "device/stream.h"
#include "run/cluster_state.h"
#include "run/executor.h"

typedef struct result_list {
  ocp_weight *const *weights;
  uint32_t count;
} result_list;

static int bind_weight(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                       ocp_error *error) {
  const result_list *results = context;
  if (index >= results->count || rank != 1 || (uint64_t)dims[0] != ocp_weight_bytes(results->weights[index]))
    return ocp_fail(error, ORT_INVALID_GRAPH,
                    "internal error: output %u of the constant-folding plan is not the %zu bytes of precomputed weight "
                    "%u (of %u). Please report it",
                    index, index < results->count ? ocp_weight_bytes(results->weights[index]) : 0, index,
                    results->count);
  const CUdeviceptr address = ocp_weight_address(results->weights[index]);
  memcpy(data, &address, sizeof *data);
  return ORT_OK;
}

int ocp_cluster_precompute(ocp_cluster *cluster, ocp_weight *const *results, uint32_t count, ocp_error *error) {
  ocp_device *device = cluster->device;
  ocp_stream *stream;
  error->code = ORT_OK;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered || ocp_stream_borrow(device, &stream, error) != ORT_OK)
    return error->code;
  result_list list = {results, count};
  const ocp_input none = {0};
  ocp_cluster_run(cluster, stream, &none, 0, bind_weight, &list, error);
  /* Waits even after an error: enqueued work may still write the weights, which the caller then frees. */
  ocp_error late = {0};
  if (ocp_stream_synchronize(stream, &late) != ORT_OK && error->code == ORT_OK)
    *error = late;
  ocp_stream_return(stream);
  return error->code;
}
