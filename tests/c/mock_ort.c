#include "mock_ort.h"

#include <string.h>

#include "base/host.h"
#include "check.h"

atomic_int mock_live_statuses, mock_log_messages;
const OrtMemoryDevice mock_cpu = {.type = OrtMemoryInfoDeviceType_CPU};

OrtMemoryDevice mock_device(uint32_t vendor, uint32_t id, OrtDeviceMemoryType memory) {
  return (OrtMemoryDevice){OrtMemoryInfoDeviceType_GPU, vendor, id, memory};
}

/* ---- OrtApi ---- */

static OrtStatus *create_status(OrtErrorCode code, const char *text) {
  OrtStatus *status = calloc(1, sizeof *status);
  CHECK(status && code != ORT_OK && text);
  status->code = code;
  snprintf(status->text, sizeof status->text, "%s", text);
  atomic_fetch_add(&mock_live_statuses, 1);
  return status;
}

static OrtErrorCode get_error_code(const OrtStatus *status) { return status->code; }
static const char *get_error_message(const OrtStatus *status) { return status->text; }

static void release_status(OrtStatus *status) {
  if (status)
    atomic_fetch_sub(&mock_live_statuses, 1);
  free(status);
}

static size_t element_size(ONNXTensorElementDataType dtype) {
  switch (dtype) {
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
    return 4;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    return 8;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
    return 1;
  default:
    return 0;
  }
}

size_t mock_bytes(const OrtValue *value) {
  size_t bytes = element_size(value->dtype);
  for (size_t i = 0; i < value->rank; i++)
    bytes *= (size_t)value->dims[i];
  return bytes;
}

static OrtStatus *get_size_in_bytes(const OrtValue *value, size_t *size) {
  if (element_size(value->dtype) == 0)
    return create_status(ORT_INVALID_ARGUMENT, "tensor of strings");
  *size = mock_bytes(value);
  return NULL;
}

static OrtStatus *get_data(const OrtValue *value, const void **out) {
  *out = value->data;
  return NULL;
}

static OrtStatus *get_mutable_data(OrtValue *value, void **out) {
  *out = value->data;
  return NULL;
}

static OrtStatus *get_type_and_shape(const OrtValue *value, ONNXTensorElementDataType *dtype, const int64_t **dims,
                                     size_t *rank) {
  *dtype = value->dtype;
  *dims = value->dims;
  *rank = value->rank;
  return NULL;
}

static OrtStatus *get_input(const OrtKernelContext *context, size_t index, const OrtValue **out) {
  *out = NULL;
  if (index >= context->num_inputs)
    return create_status(ORT_INVALID_ARGUMENT, "input index out of range");
  *out = context->inputs[index];
  return NULL;
}

static OrtStatus *get_output(OrtKernelContext *context, size_t index, const int64_t *dims, size_t rank,
                             OrtValue **out) {
  *out = NULL;
  if (context->refuse_outputs || index >= context->num_outputs)
    return create_status(ORT_FAIL, "no memory for the output");
  OrtValue *value = &context->outputs[index];
  CHECK(rank <= MOCK_MAX_RANK);
  *value = (OrtValue){.device = context->output_device,
                      .dtype = context->inputs[0]->dtype,
                      .rank = rank,
                      .allocator = context->allocator};
  memcpy(value->dims, dims, rank * sizeof *dims);
  value->data = context->allocator->Alloc(context->allocator, mock_bytes(value));
  if (!value->data)
    return create_status(ORT_FAIL, "the allocator gave nothing");
  *out = value;
  return NULL;
}

static void *get_handle(OrtSyncStream *stream) { return stream->impl ? stream->impl->GetHandle(stream->impl) : NULL; }

/* Like ORT's function, valid only for streams that a plugin made. */
static const OrtSyncStreamImpl *get_impl(const OrtSyncStream *stream) {
  CHECK(stream->impl && stream->impl->Release);
  return stream->impl;
}

static OrtStatus *get_compute_stream(const OrtKernelContext *context, void **out) {
  *out = context->stream ? get_handle(context->stream) : NULL;
  return NULL;
}

static void create_pairs(OrtKeyValuePairs **out) {
  *out = calloc(1, sizeof **out);
  CHECK(*out);
}

static void add_pair(OrtKeyValuePairs *pairs, const char *key, const char *value) {
  CHECK(pairs->count < MOCK_MAX_PAIRS);
  snprintf(pairs->keys[pairs->count], sizeof pairs->keys[0], "%s", key);
  snprintf(pairs->values[pairs->count++], sizeof pairs->values[0], "%s", value);
}

static void release_pairs(OrtKeyValuePairs *pairs) { free(pairs); }

static void get_pairs(const OrtKeyValuePairs *pairs, const char *const **keys, const char *const **values,
                      size_t *count) {
  static _Thread_local const char *found[2][MOCK_MAX_PAIRS];
  for (size_t i = 0; i < pairs->count; i++) {
    found[0][i] = pairs->keys[i];
    found[1][i] = pairs->values[i];
  }
  *keys = found[0];
  *values = found[1];
  *count = pairs->count;
}

OrtKeyValuePairs mock_environment;

static OrtStatus *get_env_config_entries(OrtKeyValuePairs **out) {
  *out = malloc(sizeof **out);
  **out = mock_environment;
  return NULL;
}

static OrtStatus *get_allocator_type(const OrtMemoryInfo *info, OrtAllocatorType *type) {
  *type = info->type;
  return NULL;
}

static OrtStatus *create_memory_info(const char *name, OrtMemoryInfoDeviceType type, uint32_t vendor, int32_t id,
                                     OrtDeviceMemoryType memory, size_t alignment, OrtAllocatorType allocator_type,
                                     OrtMemoryInfo **out) {
  CHECK(alignment == 0);
  *out = calloc(1, sizeof **out);
  CHECK(*out);
  (*out)->type = allocator_type;
  (*out)->device = (OrtMemoryDevice){type, vendor, (uint32_t)id, memory};
  snprintf((*out)->name, sizeof(*out)->name, "%s", name);
  return NULL;
}

static OrtStatus *log_message(const OrtLogger *logger, OrtLoggingLevel level, const char *message, const char *file,
                              int line, const char *function) {
  (void)level;
  (void)line;
  CHECK(logger && message && file && function);
  atomic_fetch_add(&mock_log_messages, 1);
  return NULL;
}

/* ---- OrtEpApi ---- */

static const OrtMemoryDevice *memory_device_of_info(const OrtMemoryInfo *info) { return &info->device; }
static const OrtMemoryDevice *memory_device_of_value(const OrtValue *value) { return &value->device; }
static OrtMemoryInfoDeviceType device_type(const OrtMemoryDevice *device) { return device->type; }
static OrtDeviceMemoryType memory_type(const OrtMemoryDevice *device) { return device->memory; }
static uint32_t vendor_id(const OrtMemoryDevice *device) { return device->vendor; }
static uint32_t device_id(const OrtMemoryDevice *device) { return device->id; }

static bool are_equal(const OrtMemoryDevice *a, const OrtMemoryDevice *b) {
  return a->type == b->type && a->vendor == b->vendor && a->id == b->id && a->memory == b->memory;
}

static OrtStatus *create_registry(OrtKernelRegistry **out) {
  *out = calloc(1, sizeof **out);
  CHECK(*out);
  return NULL;
}

static void release_registry(OrtKernelRegistry *registry) { free(registry); }

static OrtStatus *add_kernel(OrtKernelRegistry *registry, const OrtKernelDef *definition, OrtKernelCreateFunc create,
                             void *state) {
  CHECK(registry->count < MOCK_MAX_KERNELS && state == NULL);
  registry->definitions[registry->count] = *definition;
  registry->create[registry->count++] = create;
  return NULL;
}

static OrtStatus *create_builder(OrtKernelDefBuilder **out) {
  *out = calloc(1, sizeof(OrtKernelDef));
  CHECK(*out);
  return NULL;
}

static void release_builder(OrtKernelDefBuilder *builder) { free(builder); }
static OrtKernelDef *definition_of(OrtKernelDefBuilder *builder) { return (OrtKernelDef *)(void *)builder; }

static OrtStatus *set_operator_type(OrtKernelDefBuilder *builder, const char *op_type) {
  snprintf(definition_of(builder)->op_type, sizeof definition_of(builder)->op_type, "%s", op_type);
  return NULL;
}

static OrtStatus *set_domain(OrtKernelDefBuilder *builder, const char *domain) {
  snprintf(definition_of(builder)->domain, sizeof definition_of(builder)->domain, "%s", domain);
  return NULL;
}

static OrtStatus *set_since_version(OrtKernelDefBuilder *builder, int start, int end) {
  definition_of(builder)->first_version = start;
  definition_of(builder)->last_version = end;
  return NULL;
}

static OrtStatus *set_ep(OrtKernelDefBuilder *builder, const char *ep) {
  snprintf(definition_of(builder)->ep, sizeof definition_of(builder)->ep, "%s", ep);
  return NULL;
}

static OrtStatus *set_input_memory(OrtKernelDefBuilder *builder, size_t index, OrtMemType memory) {
  CHECK(index < MOCK_MAX_INPUTS);
  definition_of(builder)->input_memory[index] = memory;
  return NULL;
}

static OrtStatus *set_output_memory(OrtKernelDefBuilder *builder, size_t index, OrtMemType memory) {
  CHECK(index == 0);
  definition_of(builder)->output_memory = memory;
  return NULL;
}

static OrtStatus *add_type_constraint(OrtKernelDefBuilder *builder, const char *name, const OrtDataType *const *types,
                                      size_t num_types) {
  CHECK(strlen(name) == 1 && strchr("TVBI", *name) && types && num_types > 0);
  if (strchr("TV", *name))
    definition_of(builder)->num_types = num_types;
  return NULL;
}

static OrtStatus *build_definition(OrtKernelDefBuilder *builder, OrtKernelDef **out) {
  *out = malloc(sizeof **out);
  CHECK(*out);
  **out = *definition_of(builder);
  return NULL;
}

static void release_definition(OrtKernelDef *definition) { free(definition); }

static OrtStatus *get_data_type(ONNXTensorElementDataType type, const OrtDataType **out) {
  *out = NULL;
  if (type > ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4) /* like an older ONNX Runtime, which lacks the newer types */
    return create_status(ORT_NOT_IMPLEMENTED, "unknown element type");
  *out = (const OrtDataType *)(uintptr_t)(type + 1);
  return NULL;
}

/* ---- installation ---- */

void mock_ort_install(uint32_t version) {
  static OrtApi api;
  static OrtEpApi ep_api;
  api.CreateStatus = create_status;
  api.GetErrorCode = get_error_code;
  api.GetErrorMessage = get_error_message;
  api.ReleaseStatus = release_status;
  api.GetTensorSizeInBytes = get_size_in_bytes;
  api.GetTensorData = get_data;
  api.GetTensorMutableData = get_mutable_data;
  api.GetTensorElementTypeAndShapeDataReference = get_type_and_shape;
  api.KernelContext_GetInput = get_input;
  api.KernelContext_GetOutput = get_output;
  api.KernelContext_GetGPUComputeStream = get_compute_stream;
  api.CreateKeyValuePairs = create_pairs;
  api.AddKeyValuePair = add_pair;
  api.ReleaseKeyValuePairs = release_pairs;
  api.GetKeyValuePairs = get_pairs;
  api.MemoryInfoGetType = get_allocator_type;
  ep_api.GetEnvConfigEntries = get_env_config_entries;
  api.CreateMemoryInfo_V2 = create_memory_info;
  api.Logger_LogMessage = log_message;
  api.SyncStream_GetHandle = get_handle;
  ep_api.SyncStream_GetImpl = get_impl;
  ep_api.MemoryInfo_GetMemoryDevice = memory_device_of_info;
  ep_api.Value_GetMemoryDevice = memory_device_of_value;
  ep_api.MemoryDevice_GetDeviceType = device_type;
  ep_api.MemoryDevice_GetMemoryType = memory_type;
  ep_api.MemoryDevice_GetVendorId = vendor_id;
  ep_api.MemoryDevice_GetDeviceId = device_id;
  ep_api.MemoryDevice_AreEqual = are_equal;
  ep_api.CreateKernelRegistry = create_registry;
  ep_api.ReleaseKernelRegistry = release_registry;
  ep_api.KernelRegistry_AddKernel = add_kernel;
  ep_api.CreateKernelDefBuilder = create_builder;
  ep_api.ReleaseKernelDefBuilder = release_builder;
  ep_api.KernelDefBuilder_SetOperatorType = set_operator_type;
  ep_api.KernelDefBuilder_SetDomain = set_domain;
  ep_api.KernelDefBuilder_SetSinceVersion = set_since_version;
  ep_api.KernelDefBuilder_SetExecutionProvider = set_ep;
  ep_api.KernelDefBuilder_SetInputMemType = set_input_memory;
  ep_api.KernelDefBuilder_SetOutputMemType = set_output_memory;
  ep_api.KernelDefBuilder_AddTypeConstraint = add_type_constraint;
  ep_api.KernelDefBuilder_Build = build_definition;
  ep_api.ReleaseKernelDef = release_definition;
  ep_api.GetTensorDataType = get_data_type;
  ocp_api = &api;
  ocp_ep_api = &ep_api;
  ocp_api_version = version;
  ocp_logger = (const OrtLogger *)(uintptr_t)1;
}

OrtValue mock_wrap(void *data, OrtMemoryDevice device, ONNXTensorElementDataType dtype, size_t rank,
                   const int64_t *dims) {
  OrtValue value = {.device = device, .dtype = dtype, .rank = rank, .data = data};
  CHECK(rank <= MOCK_MAX_RANK);
  memcpy(value.dims, dims, rank * sizeof *dims);
  return value;
}

OrtValue mock_tensor(OrtAllocator *allocator, OrtMemoryDevice device, ONNXTensorElementDataType dtype, size_t rank,
                     const int64_t *dims) {
  OrtValue value = mock_wrap(NULL, device, dtype, rank, dims);
  value.allocator = allocator;
  value.data = allocator->Alloc(allocator, mock_bytes(&value));
  CHECK(value.data);
  return value;
}

void mock_free(OrtValue *value) {
  if (value->allocator && value->data)
    value->allocator->Free(value->allocator, value->data);
  *value = (OrtValue){0};
}
