#include "run/instance/graph_nodes.h"

#include <string.h>

#include "base/counters.h"
#include "device/release.h"
#include "driver/activity.h"
#include "driver/error.h"
#include "plan/format.h"
#include "plan/load.h"
#include "run/instance/calls.h"

static CUDA_KERNEL_NODE_PARAMS kernel_params(const ocp_instance *instance, uint32_t index) {
  const ocp_plan_record *record = &instance->variant->plan->records[index];
  const ocp_call *call = &instance->calls[index];
  return (CUDA_KERNEL_NODE_PARAMS){.func = instance->variant->functions[record->index],
                                   .gridDimX = call->grid[0],
                                   .gridDimY = call->grid[1],
                                   .gridDimZ = call->grid[2],
                                   .blockDimX = record->block[0],
                                   .blockDimY = record->block[1],
                                   .blockDimZ = record->block[2],
                                   .sharedMemBytes = call->shared_bytes,
                                   .kernelParams = call->params};
}

static CUDA_MEMCPY3D copy_params(const uint64_t *values) {
  return (CUDA_MEMCPY3D){.dstMemoryType = CU_MEMORYTYPE_DEVICE,
                         .dstDevice = values[0],
                         .srcMemoryType = CU_MEMORYTYPE_DEVICE,
                         .srcDevice = values[1],
                         .WidthInBytes = values[2],
                         .Height = 1,
                         .Depth = 1};
}

static CUDA_MEMCPY3D upload_params(const uint64_t *values) {
  CUDA_MEMCPY3D params = copy_params(values);
  params.srcMemoryType = CU_MEMORYTYPE_HOST;
  params.srcDevice = 0;
  memcpy(&params.srcHost, &values[1], sizeof params.srcHost);
  return params;
}

static CUDA_MEMSET_NODE_PARAMS memset_params(const uint64_t *values) {
  return (CUDA_MEMSET_NODE_PARAMS){
      .dst = values[0], .value = (unsigned char)values[1], .elementSize = 1, .width = values[2], .height = 1};
}

/* The arguments of a library call of an instance. */
typedef struct library_call {
  ocp_problem *problem;
  void *const *pointers;
  const int64_t *numbers;
  uint32_t num_pointers, num_numbers;
} library_call;

static library_call library_call_of(const ocp_instance *instance, uint32_t index) {
  const ocp_plan_record *record = &instance->variant->plan->records[index];
  const ocp_call *call = &instance->calls[index];
  return (library_call){.problem = instance->variant->problems[record->index],
                        .pointers = (void *const *)call->values,
                        .numbers = (const int64_t *)call->values + call->num_pointers,
                        .num_pointers = call->num_pointers,
                        .num_numbers = record->num_params - call->num_pointers};
}

bool ocp_graph_call_is_warm(const ocp_instance *instance, uint32_t index, ocp_stream *stream) {
  const library_call call = library_call_of(instance, index);
  struct ocp_prepared *none;
  ocp_error ignored = {0};
  return ocp_library_capture(call.problem, stream, NULL, call.pointers, call.num_pointers, call.numbers,
                             call.num_numbers, &none, &ignored) ||
         ignored.code != ORT_OK;
}

/* Captures a library call as a child graph, on a separate stream but with the library handle of the Run's stream.
 * *used: the algorithm that the graph needs. */
static CUresult capture_library(const ocp_instance *instance, uint32_t index, ocp_stream *run_stream, CUgraph *child,
                                struct ocp_prepared **used, ocp_error *error) {
  const library_call call = library_call_of(instance, index);
  ocp_device *device = instance->variant->device;
  ocp_stream *stream;
  *child = NULL;
  *used = NULL;
  if (ocp_stream_borrow(device, &stream, error) != ORT_OK)
    return CUDA_ERROR_UNKNOWN;
  ocp_stream_take_turn(stream, true);
  atomic_store(&stream->capturing, true);
  CUresult result = device->driver->StreamBeginCapture(stream->handle, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  if (result == CUDA_SUCCESS) {
    if (!ocp_library_capture(call.problem, run_stream, stream, call.pointers, call.num_pointers, call.numbers,
                             call.num_numbers, used, error) &&
        error->code == ORT_OK)
      ocp_fail(error, ORT_RUNTIME_EXCEPTION, "a library call has not run before, so it cannot be captured");
    result = ocp_stream_end_capture(stream, child);
  }
  atomic_store(&stream->capturing, false);
  ocp_stream_end_turn(stream);
  ocp_stream_return(stream);
  size_t num_nodes = 0;
  if (result == CUDA_SUCCESS && error->code == ORT_OK)
    result = device->driver->GraphGetNodes(*child, NULL, &num_nodes);
  if (result != CUDA_SUCCESS)
    ocp_fail_cuda(error, device->driver, result, "capturing a library call");
  else if (error->code == ORT_OK && num_nodes == 0)
    ocp_fail(error, ORT_RUNTIME_EXCEPTION, "a library call enqueues nothing on its stream, so it cannot be captured");
  if (error->code == ORT_OK)
    return CUDA_SUCCESS;
  if (*child)
    ocp_device_released(device, device->driver->GraphDestroy(*child), "cuGraphDestroy");
  ocp_library_let_go(call.problem, *used);
  *child = NULL;
  *used = NULL;
  return result != CUDA_SUCCESS ? result : CUDA_ERROR_UNKNOWN;
}

void ocp_graph_node_release(const ocp_variant *variant, uint32_t index, struct ocp_prepared *used) {
  if (used)
    ocp_library_let_go(variant->problems[variant->plan->records[index].index], used);
}

static size_t count_of(const ocp_graph_before *before) {
  return (before->nodes[0] != NULL) + (before->nodes[1] != NULL);
}

static const CUgraphNode *first_of(const ocp_graph_before *before) { return &before->nodes[before->nodes[0] == NULL]; }

static CUresult add(const ocp_instance *instance, uint32_t index, ocp_stream *stream, CUgraph graph,
                    ocp_graph_before before, CUgraphNode *node, struct ocp_prepared **used, ocp_error *error) {
  ocp_device *device = instance->variant->device;
  const ocp_driver *driver = device->driver;
  const uint64_t *values = instance->calls[index].values;
  const size_t num_before = count_of(&before);
  const CUgraphNode *const first = first_of(&before);
  switch (instance->calls[index].kind) {
  case OCP_RECORD_LAUNCH: {
    const CUDA_KERNEL_NODE_PARAMS params = kernel_params(instance, index);
    return driver->GraphAddKernelNode(node, graph, first, num_before, &params);
  }
  case OCP_RECORD_COPY: {
    const CUDA_MEMCPY3D params = copy_params(values);
    return driver->GraphAddMemcpyNode(node, graph, first, num_before, &params, device->context);
  }
  case OCP_RECORD_UPLOAD: {
    const CUDA_MEMCPY3D params = upload_params(values);
    return driver->GraphAddMemcpyNode(node, graph, first, num_before, &params, device->context);
  }
  case OCP_RECORD_MEMSET: {
    const CUDA_MEMSET_NODE_PARAMS params = memset_params(values);
    return driver->GraphAddMemsetNode(node, graph, first, num_before, &params, device->context);
  }
  default: {
    CUgraph child;
    CUresult result = capture_library(instance, index, stream, &child, used, error);
    if (result == CUDA_SUCCESS) {
      result = driver->GraphAddChildGraphNode(node, graph, first, num_before, child);
      ocp_device_released(device, driver->GraphDestroy(child), "cuGraphDestroy");
    }
    return result;
  }
  }
}

CUresult ocp_graph_node_add(const ocp_instance *instance, uint32_t index, ocp_stream *stream, CUgraph graph,
                            ocp_graph_before before, CUgraphNode *node, struct ocp_prepared **used, ocp_error *error) {
  ocp_activity_of_node(instance->variant->first_source + index);
  const CUresult result = add(instance, index, stream, graph, before, node, used, error);
  ocp_activity_of_node(0);
  return result;
}

CUresult ocp_graph_loop_add(ocp_device *device, CUgraphConditionalHandle handle, CUgraph graph, ocp_graph_before before,
                            CUgraphNode *node, CUgraph *body) {
  CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_CONDITIONAL};
  params.conditional.node = (CUDA_CONDITIONAL_NODE_PARAMS){
      .handle = handle, .type = CU_GRAPH_COND_TYPE_WHILE, .size = 1, .ctx = device->context};
  const CUresult result =
      device->driver->GraphAddNode(node, graph, first_of(&before), NULL, count_of(&before), &params);
  if (result == CUDA_SUCCESS)
    *body = params.conditional.node.phGraph_out[0];
  return result;
}

static CUresult change(const ocp_instance *instance, uint32_t index, ocp_stream *stream, CUgraphExec exec,
                       CUgraphNode node, struct ocp_prepared **used) {
  ocp_device *device = instance->variant->device;
  const ocp_driver *driver = device->driver;
  const uint64_t *values = instance->calls[index].values;
  ocp_count(OCP_GRAPH_UPDATES, 1);
  switch (instance->calls[index].kind) {
  case OCP_RECORD_LAUNCH: {
    const CUDA_KERNEL_NODE_PARAMS params = kernel_params(instance, index);
    return driver->GraphExecKernelNodeSetParams(exec, node, &params);
  }
  case OCP_RECORD_COPY: {
    const CUDA_MEMCPY3D params = copy_params(values);
    return driver->GraphExecMemcpyNodeSetParams(exec, node, &params, device->context);
  }
  case OCP_RECORD_UPLOAD: {
    const CUDA_MEMCPY3D params = upload_params(values);
    return driver->GraphExecMemcpyNodeSetParams(exec, node, &params, device->context);
  }
  case OCP_RECORD_MEMSET: {
    const CUDA_MEMSET_NODE_PARAMS params = memset_params(values);
    return driver->GraphExecMemsetNodeSetParams(exec, node, &params, device->context);
  }
  default: {
    CUgraph child;
    struct ocp_prepared *newer;
    ocp_error ignored = {0}; /* the caller then builds a new graph, which reports the error */
    CUresult result = capture_library(instance, index, stream, &child, &newer, &ignored);
    if (result == CUDA_SUCCESS) {
      result = driver->GraphExecChildGraphNodeSetParams(exec, node, child);
      ocp_device_released(device, driver->GraphDestroy(child), "cuGraphDestroy");
      ocp_graph_node_release(instance->variant, index, *used);
      *used = newer;
    }
    return result;
  }
  }
}

CUresult ocp_graph_node_change(const ocp_instance *instance, uint32_t index, ocp_stream *stream, CUgraphExec exec,
                               CUgraphNode node, struct ocp_prepared **used) {
  ocp_activity_of_node(instance->variant->first_source + index);
  const CUresult result = change(instance, index, stream, exec, node, used);
  ocp_activity_of_node(0);
  return result;
}
