/* OrtNodeComputeInfo and OrtKernelImpl for an ocp_cluster: converts ORT's values to ocp_input, runs the cluster, and
 * lets ORT allocate the outputs. In a Run, the functions of this file allocate host memory only for more than
 * INPUTS_ON_STACK inputs. */
#include "ort/kernels/compute.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/host.h"
#include "device/stream.h"
#include "device/wait.h"
#include "ort/data/allocator.h"
#include "ort/data/capture.h"
#include "ort/data/stream.h"
#include "run/executor.h"
#include "run/instance/input.h"
#include "run/pipeline.h"
#include "run/repeat.h"

enum { INPUTS_ON_STACK = 32, LABEL_BYTES = 256 };

/* The cluster, loop or pipeline that an ORT call executes. */
typedef struct target {
  ocp_cluster *cluster;
  const ocp_repeat *repeat;     /* the loop; NULL: the target is not a loop */
  const ocp_pipeline *pipeline; /* the pipeline; NULL: the target is not a pipeline */
  ocp_device *device;
  uint32_t num_inputs;                  /* number of the cluster's inputs */
  const OrtMemoryDevice *device_memory; /* memory of `device`, where inputs normally are */
  const uint32_t *inputs, *outputs; /* map an index at the cluster to the index at ORT's node; NULL: both are equal */
  const char *const *names;         /* names of the inputs, for errors; NULL: ORT names the node in them */
} target;

typedef struct compute_info {
  OrtNodeComputeInfo ort;
  target target;
  const char *names[]; /* followed by the storage of target.inputs and target.outputs, and by the names' characters */
} compute_info;

typedef struct node_kernel {
  OrtKernelImpl ort;
  target target;
  uint32_t num_constants;
  uint32_t *constants;  /* inputs of the node whose contents the cluster holds */
  uint32_t positions[]; /* storage of target.inputs, target.outputs and constants, in this order */
} node_kernel;

/* Context of the function that allocates the cluster's outputs. */
typedef struct output_context {
  OrtKernelContext *ort;
  const uint32_t *positions;
} output_context;

static bool is_empty(const int64_t *dims, size_t rank) {
  bool empty = false;
  for (size_t i = 0; i < rank; i++)
    empty |= dims[i] == 0;
  return empty;
}

/* Formats "input 'x'", or "input 2" without a name. */
static const char *label(uint32_t index, const char *name, char text[LABEL_BYTES]) {
  if (name)
    snprintf(text, LABEL_BYTES, "input '%.200s'", name);
  else
    snprintf(text, LABEL_BYTES, "input %u", index);
  return text;
}

static bool has_value(const OrtValue *value) {
  int has = 0;
  OrtStatus *status = ocp_api->HasValue(value, &has);
  if (status)
    ocp_api->ReleaseStatus(status);
  return status || has;
}

int ocp_ort_input_of(const OrtValue *value, uint32_t index, const char *name, const OrtMemoryDevice *device_memory,
                     ocp_input *input, ocp_error *error) {
  char text[LABEL_BYTES];
  ONNXTensorElementDataType dtype = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  size_t rank = 0;
  OrtStatus *status = ocp_api->GetTensorElementTypeAndShapeDataReference(value, &dtype, &input->dims, &rank);
  if (!status)
    status = ocp_api->GetTensorData(value, &input->data);
  if (status && !has_value(value)) {
    ocp_api->ReleaseStatus(status);
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s has no value. Bind a value, or pass one to the Run",
                    label(index, name, text));
  }
  if (status)
    return ocp_fail_status(error, status);
  if (!input->data && !is_empty(input->dims, rank))
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s has no memory: %s", label(index, name, text),
                    ocp_ort_why_no_memory());
  input->dtype = (uint32_t)dtype;
  input->rank = (uint32_t)rank;
  /* ORT can pass host memory; the application can pass memory of another device. */
  const OrtMemoryDevice *memory = ocp_ep_api->Value_GetMemoryDevice(value);
  input->on_device = ocp_ep_api->MemoryDevice_AreEqual(memory, device_memory);
  if (!input->on_device && ocp_ep_api->MemoryDevice_GetDeviceType(memory) != OrtMemoryInfoDeviceType_CPU &&
      ocp_ep_api->MemoryDevice_GetMemoryType(memory) == OrtDeviceMemoryType_DEFAULT)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "%s is in the memory of another device. Copy the tensor to the session's device, or to the host",
                    label(index, name, text));
  return ORT_OK;
}

static int gather_input(const target *self, const OrtKernelContext *context, uint32_t number, ocp_input *input,
                        ocp_error *error) {
  const uint32_t index = self->inputs ? self->inputs[number] : number;
  const char *name = self->names ? self->names[number] : NULL;
  const OrtValue *value = NULL;
  OrtStatus *status = ocp_api->KernelContext_GetInput(context, index, &value);
  char text[LABEL_BYTES];
  if (status)
    return ocp_fail_status(error, status);
  if (!value)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "%s is missing: ONNX Runtime passed no value for the input to the fused node. Report the model",
                    label(index, name, text));
  return ocp_ort_input_of(value, index, name, self->device_memory, input, error);
}

static int allocate_output(void *context, uint32_t number, const int64_t *dims, uint32_t rank, void **data,
                           ocp_error *error) {
  const output_context *to = context;
  const uint32_t index = to->positions ? to->positions[number] : number;
  OrtValue *value = NULL;
  OrtStatus *status = ocp_api->KernelContext_GetOutput(to->ort, index, dims, rank, &value);
  *data = NULL;
  if (!status && value)
    status = ocp_api->GetTensorMutableData(value, data);
  if (status)
    return ocp_fail_status(error, status);
  /* ORT makes a tensor even if its allocator returned NULL. */
  return *data || !value || is_empty(dims, rank)
             ? ORT_OK
             : ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s", ocp_ort_why_no_memory());
}

static int run_target(const target *self, ocp_stream *stream, const ocp_input *inputs, ocp_output_fn output,
                      void *output_context, ocp_error *error) {
  ocp_work work = {.stream = stream};
  if (ocp_ort_begin_work(&work, self->device, error) != ORT_OK)
    return error->code;
  ocp_ort_allocating_on(stream);
  if (self->repeat)
    ocp_repeat_run(self->repeat, work.stream, inputs, self->num_inputs, output, output_context, error);
  else if (self->pipeline)
    ocp_pipeline_run(self->pipeline, work.stream, inputs, self->num_inputs, output, output_context, error);
  else
    ocp_cluster_run(self->cluster, work.stream, inputs, self->num_inputs, output, output_context, error);
  ocp_ort_allocating_on(NULL);
  ocp_capture_computed(work.stream, error->code == ORT_OK);
  ocp_ort_end_work(&work, error);
  return error->code;
}

int ocp_ort_run_cluster(ocp_cluster *cluster, ocp_device *device, ocp_stream *stream, const ocp_input *inputs,
                        uint32_t num_inputs, ocp_output_fn output, void *output_context, ocp_error *error) {
  const target self = {.cluster = cluster, .device = device, .num_inputs = num_inputs};
  return run_target(&self, stream, inputs, output, output_context, error);
}

static int run(const target *self, OrtKernelContext *context, ocp_input *inputs, ocp_error *error) {
  ocp_stream *stream = NULL;
  for (uint32_t i = 0; i < self->num_inputs; i++)
    if (gather_input(self, context, i, &inputs[i], error) != ORT_OK)
      return error->code;
  if (ocp_ort_stream_of_context(context, self->device, &stream, error) != ORT_OK)
    return error->code;
  output_context to = {context, self->outputs};
  return run_target(self, stream, inputs, allocate_output, &to, error);
}

static OrtStatus *compute(const target *self, OrtKernelContext *context) {
  ocp_input on_stack[INPUTS_ON_STACK], *inputs = on_stack;
  ocp_error error;
  error.code = ORT_OK; /* error.text stays uninitialized: it is read only after a failure */
  if (self->num_inputs > INPUTS_ON_STACK && !(inputs = malloc(self->num_inputs * sizeof *inputs)))
    ocp_fail_memory(&error);
  else
    run(self, context, inputs, &error);
  if (inputs != on_stack)
    free(inputs);
  return ocp_status(&error);
}

static int make_target(target *out, ocp_cluster *cluster, ocp_device *device, uint32_t num_inputs, ocp_error *error) {
  const OrtMemoryInfo *memory_info = NULL;
  if (ocp_ort_memory_info(device->emulated, device->ordinal, OCP_INFO_DEVICE, &memory_info, error) != ORT_OK)
    return error->code;
  *out = (target){.cluster = cluster,
                  .device = device,
                  .num_inputs = num_inputs,
                  .device_memory = ocp_ep_api->MemoryInfo_GetMemoryDevice(memory_info)};
  return ORT_OK;
}

/* ---- fused nodes ---- */

static OrtStatus *create_state(OrtNodeComputeInfo *this_ptr, OrtNodeComputeContext *context, void **state) {
  (void)context;
  *state = this_ptr; /* shared by all Runs: the state of a Run is on the stack */
  return NULL;
}

static void release_state(OrtNodeComputeInfo *this_ptr, void *state) {
  (void)this_ptr;
  (void)state;
}

static OrtStatus *compute_fused(OrtNodeComputeInfo *this_ptr, void *state, OrtKernelContext *context) {
  (void)state;
  return compute(&((const compute_info *)(const void *)this_ptr)->target, context);
}

/* `what->inputs`: the indices of the inputs, followed by those of `num_outputs` outputs; NULL: no indices. */
static OrtNodeComputeInfo *compute_info_of(const target *what, ocp_device *device, const char *const *names,
                                           uint32_t num_inputs, uint32_t num_outputs, ocp_error *error) {
  target made;
  if (make_target(&made, what->cluster, device, num_inputs, error) != ORT_OK)
    return NULL;
  made.repeat = what->repeat;
  made.pipeline = what->pipeline;
  const size_t count = what->inputs ? (size_t)num_inputs + num_outputs : 0;
  size_t text_bytes = 0;
  for (uint32_t i = 0; i < num_inputs; i++)
    text_bytes += strlen(names[i]) + 1;
  compute_info *self =
      calloc(1, sizeof *self + num_inputs * sizeof *self->names + count * sizeof *what->inputs + text_bytes);
  if (!self) {
    ocp_fail_memory(error);
    return NULL;
  }
  *self = (compute_info){.ort = {.ort_version_supported = ocp_api_version,
                                 .CreateState = create_state,
                                 .Compute = compute_fused,
                                 .ReleaseState = release_state},
                         .target = made};
  self->target.names = self->names;
  uint32_t *positions = (uint32_t *)(void *)(self->names + num_inputs);
  if (what->inputs) {
    self->target.inputs = memcpy(positions, what->inputs, count * sizeof *positions);
    self->target.outputs = positions + num_inputs;
  }
  char *text = (char *)(positions + count);
  for (uint32_t i = 0; i < num_inputs; i++) {
    const size_t bytes = strlen(names[i]) + 1;
    self->names[i] = memcpy(text, names[i], bytes);
    text += bytes;
  }
  return &self->ort;
}

OrtNodeComputeInfo *ocp_compute_info_create(ocp_cluster *cluster, ocp_device *device, const char *const *names,
                                            const uint32_t *positions, uint32_t num_inputs, uint32_t num_outputs,
                                            ocp_error *error) {
  const target what = {.cluster = cluster, .inputs = positions};
  return compute_info_of(&what, device, names, num_inputs, num_outputs, error);
}

OrtNodeComputeInfo *ocp_compute_info_of_repeat(const ocp_repeat *repeat, ocp_device *device, const char *const *names,
                                               ocp_error *error) {
  return compute_info_of(&(target){.repeat = repeat}, device, names, ocp_repeat_num_inputs(repeat), 0, error);
}

OrtNodeComputeInfo *ocp_compute_info_of_pipeline(const ocp_pipeline *pipeline, ocp_device *device,
                                                 const char *const *names, ocp_error *error) {
  return compute_info_of(&(target){.pipeline = pipeline}, device, names, ocp_pipeline_num_inputs(pipeline), 0, error);
}

void ocp_compute_info_release(OrtNodeComputeInfo *info) { free(info); }

/* ---- kernels ---- */

static OrtStatus *compute_kernel(OrtKernelImpl *this_ptr, OrtKernelContext *context) {
  return compute(&((const node_kernel *)(const void *)this_ptr)->target, context);
}

static void release_kernel(OrtKernelImpl *this_ptr) { free(this_ptr); }

/* Tells ORT that it need not keep a constant input: the weight store, shared by all sessions, has its contents. */
static OrtStatus *prepack_weight(OrtKernelImpl *this_ptr, const OrtValue *tensor, int input_index,
                                 OrtAllocator *allocator, OrtSharedPrePackedWeightCache *cache, bool *is_packed) {
  const node_kernel *self = (const node_kernel *)(const void *)this_ptr;
  (void)tensor;
  (void)allocator;
  (void)cache;
  *is_packed = false;
  for (uint32_t i = 0; i < self->num_constants; i++)
    *is_packed |= self->constants[i] == (uint32_t)input_index;
  return NULL;
}

OrtKernelImpl *ocp_node_kernel_create(const ocp_node_kernel_spec *spec, ocp_error *error) {
  target made;
  if (make_target(&made, spec->cluster, spec->device, spec->num_inputs, error) != ORT_OK)
    return NULL;
  const size_t count = (size_t)spec->num_inputs + spec->num_outputs + spec->num_constants;
  node_kernel *self = calloc(1, sizeof *self + count * sizeof *self->positions);
  if (!self) {
    ocp_fail_memory(error);
    return NULL;
  }
  self->ort = (OrtKernelImpl){.ort_version_supported = ocp_api_version,
                              .Compute = compute_kernel,
                              .Release = release_kernel,
                              .PrePackWeight = prepack_weight};
  self->target = made;
  self->target.inputs = self->positions;
  self->target.outputs = self->positions + spec->num_inputs;
  self->constants = self->positions + spec->num_inputs + spec->num_outputs;
  self->num_constants = spec->num_constants;
  memcpy(self->positions, spec->positions, count * sizeof *self->positions);
  return &self->ort;
}
