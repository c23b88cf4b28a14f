/* Kernels of If, Loop and Scan. ORT runs the bodies and counts the iterations. It needs only two operations of an EP:
 * concatenating the outputs of a Loop's iterations, and transposing the axis along which a Scan runs.
 *
 * ORT needs the condition of an If, the trip count of a Loop and its condition in host memory. The condition that a
 * Loop's body returns is copied to the host once per iteration. Loop-carried tensors stay on the device. */
#include "ort/kernels/control_flow.h"

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "ort/data/allocator.h"
#include "ort/data/ep_state.h"
#include "ort/data/memory.h"
#include "ort/data/stream.h"
#include "ort/kernels/compute.h"
#include "plan/format.h"
#include "python/host.h"
#include "run/executor.h"

/* ---- Loop ---- */

typedef struct loop_helper {
  OrtLoopKernelHelper ort; /* first member: ORT's view */
  ocp_device *device;
} loop_helper;

static void loop_release(OrtLoopKernelHelper *this_ptr) { free(this_ptr); }

static int concat(ocp_stream *stream, const OrtValue *const *parts, size_t num_parts, char *output, size_t room,
                  ocp_error *error) {
  for (size_t i = 0; i < num_parts; i++) {
    size_t bytes;
    if (ocp_ort_copy_to_device(stream, output, room, parts[i], &bytes, error) != ORT_OK)
      return error->code;
    output += bytes;
    room -= bytes;
  }
  return ORT_OK;
}

static OrtStatus *loop_concat(OrtLoopKernelHelper *this_ptr, void *stream_handle,
                              const OrtValue *const *per_iteration_outputs, size_t num_per_iteration_outputs,
                              void *output, size_t output_size_in_bytes) {
  const loop_helper *self = (const loop_helper *)(const void *)this_ptr;
  ocp_error error = {0};
  ocp_work work = {.stream = stream_handle ? ocp_stream_of_handle(self->device, stream_handle) : NULL};
  if (ocp_ort_begin_work(&work, self->device, &error) == ORT_OK) {
    concat(work.stream, per_iteration_outputs, num_per_iteration_outputs, output, output_size_in_bytes, &error);
    ocp_ort_end_work(&work, &error);
  }
  return ocp_status(&error);
}

/* ---- Scan ---- */

/* A transposition, in which axes that stay adjacent are merged, and the cluster that executes it. */
typedef struct transposition {
  struct transposition *next;
  uint32_t rank, dtype; /* dtype: the unsigned integer type of the elements' size */
  uint32_t permutation[OCP_MAX_RANK];
  ocp_cluster *cluster; /* owned by the EP's Python object */
} transposition;

typedef struct scan_helper {
  OrtScanKernelHelper ort; /* first member: ORT's view */
  ocp_device *device;
  const OrtMemoryDevice *device_memory;
  int64_t ep;
  pthread_mutex_t lock;
  transposition *known; /* transpositions of earlier Runs */
} scan_helper;

static void scan_release(OrtScanKernelHelper *this_ptr) {
  scan_helper *self = (scan_helper *)(void *)this_ptr;
  while (self->known) {
    transposition *next = self->known->next;
    free(self->known);
    self->known = next;
  }
  pthread_mutex_destroy(&self->lock);
  free(self);
}

/* Merges axes that stay adjacent under the permutation, and computes the sizes of the merged axes. Example:
 * shape [a, b, c, d] with permutation (2, 3, 0, 1) becomes shape [a*b, c*d] with permutation (1, 0). */
static int find_blocks(const size_t *permutation, size_t rank, const int64_t *dims, transposition *wanted,
                       int64_t sizes[OCP_MAX_RANK], ocp_error *error) {
  uint32_t block_of[OCP_MAX_RANK] = {0}, count = 0; /* block_of: nonzero for the first axis of a block only */
  if (rank > OCP_MAX_RANK)
    return ocp_fail(error, ORT_NOT_IMPLEMENTED, "Scan: a tensor has rank %zu, at most %d is supported", rank,
                    OCP_MAX_RANK);
  for (size_t i = 0; i < rank; i++) {
    const size_t axis = permutation[i];
    if (axis >= rank)
      return ocp_fail(error, ORT_INVALID_ARGUMENT, "Scan: axis %zu does not exist in a tensor of rank %zu", axis, rank);
    if (i == 0 || axis != permutation[i - 1] + 1)
      block_of[axis] = ++count;
  }
  uint32_t block = 0;
  for (size_t axis = 0; axis < rank; axis++) {
    if (block_of[axis]) {
      wanted->permutation[block_of[axis] - 1] = block;
      sizes[block++] = 1;
    }
    sizes[block - 1] *= dims[axis];
  }
  wanted->rank = count;
  return ORT_OK;
}

static ocp_cluster *find_known(const scan_helper *self, const transposition *wanted) {
  for (const transposition *known = self->known; known; known = known->next)
    if (known->rank == wanted->rank && known->dtype == wanted->dtype &&
        memcmp(known->permutation, wanted->permutation, wanted->rank * sizeof *wanted->permutation) == 0)
      return known->cluster;
  return NULL;
}

static ocp_cluster *cluster_for(scan_helper *self, const transposition *wanted, ocp_error *error) {
  pthread_mutex_lock(&self->lock);
  ocp_cluster *cluster = find_known(self, wanted);
  pthread_mutex_unlock(&self->lock);
  if (cluster)
    return cluster;
  /* Without the lock: ocp_python_call waits for the GIL, whose holder may wait for the lock. */
  const ocp_python *python = ocp_python_call(error);
  if (!python ||
      python->transposition(self->ep, wanted->permutation, wanted->rank, wanted->dtype, &cluster, error) != ORT_OK)
    return NULL;
  transposition *made = malloc(sizeof *made);
  if (made) { /* if out of memory, the next Run asks Python for the same cluster */
    *made = *wanted;
    made->cluster = cluster;
    pthread_mutex_lock(&self->lock);
    made->next = self->known;
    self->known = made;
    pthread_mutex_unlock(&self->lock);
  }
  return cluster;
}

static int give_output(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                       ocp_error *error) {
  (void)index;
  (void)dims;
  (void)rank;
  OrtStatus *status = ocp_api->GetTensorMutableData(context, data);
  if (status)
    return ocp_fail_status(error, status);
  return *data ? ORT_OK : ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s", ocp_ort_why_no_memory());
}

static int transpose(scan_helper *self, const size_t *permutation, size_t rank, const OrtValue *input,
                     ocp_stream *stream, OrtValue *output, ocp_error *error) {
  ocp_input source;
  int64_t sizes[OCP_MAX_RANK];
  transposition wanted = {.rank = 0};
  if (ocp_ort_input_of(input, 0, NULL, self->device_memory, &source, error) != ORT_OK)
    return error->code;
  for (uint32_t i = 0; i < source.rank; i++)
    if (source.dims[i] == 0)
      return ORT_OK;
  if (rank != source.rank)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "Scan: got a permutation of %zu axes for a tensor of rank %u", rank,
                    source.rank);
  if (!(wanted.dtype = ocp_dtype_of_bytes(ocp_dtype_bits(source.dtype) / 8)))
    return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                    "Scan: elements of type %u cannot be transposed, expected elements of 1, 2, 4 or 8 bytes",
                    source.dtype);
  if (find_blocks(permutation, rank, source.dims, &wanted, sizes, error) != ORT_OK)
    return error->code;
  if (wanted.rank < 2)
    return ocp_ort_copy_tensor(input, output, stream, error);
  ocp_cluster *cluster = cluster_for(self, &wanted, error);
  if (!cluster)
    return error->code;
  source.dims = sizes;
  source.rank = wanted.rank;
  source.dtype = wanted.dtype;
  return ocp_ort_run_cluster(cluster, self->device, stream, &source, 1, give_output, output, error);
}

static OrtStatus *scan_transpose(OrtScanKernelHelper *this_ptr, const size_t *permutation, size_t num_permutation_elems,
                                 const OrtValue *input, OrtSyncStream *stream, OrtValue *output) {
  ocp_error error = {0};
  transpose((scan_helper *)(void *)this_ptr, permutation, num_permutation_elems, input, ocp_ort_stream(stream), output,
            &error);
  return ocp_status(&error);
}

/* ---- the registry ---- */

static OrtStatus *out_of_memory(void) { return ocp_api->CreateStatus(ORT_FAIL, OCP_OUT_OF_HOST_MEMORY); }

static OrtStatus *create_if(void *state, const OrtKernelInfo *info, OrtKernelImpl **out) {
  (void)state;
  return ocp_ep_api->CreateIfKernel(info, out);
}

static OrtStatus *create_loop(void *state, const OrtKernelInfo *info, OrtKernelImpl **out) {
  (void)state;
  const OrtEp *ep = NULL;
  OrtStatus *status = ocp_ep_api->KernelInfo_GetEp(info, &ep);
  if (status)
    return status;
  loop_helper *helper = calloc(1, sizeof *helper);
  if (!helper)
    return out_of_memory();
  *helper = (loop_helper){
      .ort = {.ort_version_supported = ocp_api_version, .Release = loop_release, .ConcatOutput = loop_concat},
      .device = ocp_ep_config_of(ep)->device};
  if ((status = ocp_ep_api->CreateLoopKernel(info, &helper->ort, out)))
    free(helper);
  return status;
}

static OrtStatus *create_scan(void *state, const OrtKernelInfo *info, OrtKernelImpl **out) {
  (void)state;
  const OrtEp *ep = NULL;
  OrtStatus *status = ocp_ep_api->KernelInfo_GetEp(info, &ep);
  if (status)
    return status;
  scan_helper *helper = calloc(1, sizeof *helper);
  if (!helper)
    return out_of_memory();
  *helper = (scan_helper){
      .ort = {.ort_version_supported = ocp_api_version, .Release = scan_release, .Transpose = scan_transpose},
      .device = ocp_ep_config_of(ep)->device,
      .device_memory = ocp_ep_api->MemoryInfo_GetMemoryDevice(ocp_ep_config_of(ep)->device_memory),
      .ep = ocp_ep_config_of(ep)->handle};
  pthread_mutex_init(&helper->lock, NULL);
  if ((status = ocp_ep_api->CreateScanKernel(info, &helper->ort, out)))
    scan_release(&helper->ort);
  return status;
}

/* Element types of whole bytes: ORT concatenates the results of iterations byte by byte. ONNX has 8-bit floats since
 * opset 19. Strings, sequences and optional values do not live on a device. */
static const ONNXTensorElementDataType element_types[] = {
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,          ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,           ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,          ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,          ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,        ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,         ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,       ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FNUZ, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2FNUZ,
};
enum {
  NUM_TYPES = sizeof element_types / sizeof *element_types,
  NUM_TYPES_BEFORE_19 = NUM_TYPES - 4,
  MAX_VERSIONS = 8
};

typedef struct operator_kernels {
  const char *name;
  OrtKernelCreateFunc create;
  bool has_trip_count, has_condition; /* inputs in host memory */
  int starts[MAX_VERSIONS];           /* the opsets that redefine the operator, ascending */
} operator_kernels;

static const operator_kernels operators[] = {
    {"If", create_if, false, true, {1, 11, 13, 19, 21, 23, 25}},
    {"Loop", create_loop, true, true, {1, 11, 13, 19, 21, 23, 25}},
    {"Scan", create_scan, false, false, {9, 11, 16, 19, 21, 23, 25}},
};

static OrtStatus *describe(OrtKernelDefBuilder *builder, const operator_kernels *operator, ocp_identity identity,
                           int first, int last, const OrtDataType *const *types) {
  const OrtDataType *flag = NULL, *count = NULL;
  OrtStatus *status;
  size_t input = 0;
  if ((status = ocp_ep_api->GetTensorDataType(ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, &flag)) ||
      (status = ocp_ep_api->GetTensorDataType(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &count)) ||
      (status = ocp_ep_api->KernelDefBuilder_SetOperatorType(builder, operator->name)) ||
      (status = ocp_ep_api->KernelDefBuilder_SetDomain(builder, "")) ||
      (status = ocp_ep_api->KernelDefBuilder_SetSinceVersion(builder, first, last)) ||
      (status = ocp_ep_api->KernelDefBuilder_SetExecutionProvider(builder, ocp_ep_names[identity])) ||
      (status = ocp_ep_api->KernelDefBuilder_AddTypeConstraint(builder, "V", types,
                                                               first < 19 ? NUM_TYPES_BEFORE_19 : NUM_TYPES)))
    return status;
  if (operator->has_trip_count &&
      ((status = ocp_ep_api->KernelDefBuilder_AddTypeConstraint(builder, "I", &count, 1)) ||
       (status = ocp_ep_api->KernelDefBuilder_SetInputMemType(builder, input++, OrtMemTypeCPUInput))))
    return status;
  if (operator->has_condition &&
      ((status = ocp_ep_api->KernelDefBuilder_AddTypeConstraint(builder, "B", &flag, 1)) ||
       (status = ocp_ep_api->KernelDefBuilder_SetInputMemType(builder, input++, OrtMemTypeCPUInput))))
    return status;
  return NULL;
}

static OrtStatus *add(OrtKernelRegistry *registry, const operator_kernels *operator, ocp_identity identity, int first,
                      int last, const OrtDataType *const *types) {
  OrtKernelDefBuilder *builder = NULL;
  OrtKernelDef *definition = NULL;
  OrtStatus *status = ocp_ep_api->CreateKernelDefBuilder(&builder);
  if (status)
    return status;
  if (!(status = describe(builder, operator, identity, first, last, types)) &&
      !(status = ocp_ep_api->KernelDefBuilder_Build(builder, &definition))) {
    status = ocp_ep_api->KernelRegistry_AddKernel(registry, definition, operator->create, NULL);
    ocp_ep_api->ReleaseKernelDef(definition);
  }
  ocp_ep_api->ReleaseKernelDefBuilder(builder);
  return status;
}

OrtStatus *ocp_ort_add_control_flow(OrtKernelRegistry *registry, ocp_identity identity) {
  const OrtDataType *types[NUM_TYPES];
  OrtStatus *status = NULL;
  for (size_t i = 0; i < NUM_TYPES && !status; i++)
    status = ocp_ep_api->GetTensorDataType(element_types[i], &types[i]);
  for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
    for (const int *start = operators[i].starts; *start && !status; start++)
      status = add(registry, &operators[i], identity, start[0], start[1] ? start[1] - 1 : INT_MAX, types);
  return status;
}
