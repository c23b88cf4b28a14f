/* cuDNN's backend API: descriptors, the search for the execution plan of an operation graph, and its execution. */
#include "vendor/cudnn.h"

#include <stdio.h>
#include <stdlib.h>

ocp_dnn_functions ocp_dnn;
const char *const ocp_dnn_symbols[] = {
    "cudnnGetVersion",
    "cudnnCreate",
    "cudnnDestroy",
    "cudnnSetStream",
    "cudnnGetErrorString",
    "cudnnBackendCreateDescriptor",
    "cudnnBackendDestroyDescriptor",
    "cudnnBackendFinalize",
    "cudnnBackendSetAttribute",
    "cudnnBackendGetAttribute",
    "cudnnBackendExecute",
};
_Static_assert(sizeof ocp_dnn == sizeof ocp_dnn_symbols, "one function per symbol");

void ocp_dnn_note(ocp_dnn_builder *b, cudnnStatus_t status, const char *what) {
  if (!b->status && status) {
    b->status = status;
    b->failed = what;
  }
}

cudnnBackendDescriptor_t ocp_dnn_create(ocp_dnn_builder *b, int type) {
  cudnnBackendDescriptor_t descriptor = NULL;
  if (b->status)
    return NULL;
  ocp_dnn_note(b, ocp_dnn.BackendCreateDescriptor(type, &descriptor), "cudnnBackendCreateDescriptor");
  if (descriptor)
    b->conv->descriptors[b->conv->num_descriptors++] = descriptor;
  return descriptor;
}

void ocp_dnn_set(ocp_dnn_builder *b, cudnnBackendDescriptor_t descriptor, int attribute, int type, int64_t count,
                 const void *elements) {
  if (!b->status)
    ocp_dnn_note(b, ocp_dnn.BackendSetAttribute(descriptor, attribute, type, count, elements),
                 "cudnnBackendSetAttribute");
}

void ocp_dnn_finalize(ocp_dnn_builder *b, cudnnBackendDescriptor_t descriptor) {
  if (!b->status)
    ocp_dnn_note(b, ocp_dnn.BackendFinalize(descriptor), "cudnnBackendFinalize");
}

static int fail(ocp_error *error, cudnnStatus_t status, const char *what) {
  const bool passes = status == CUDNN_STATUS_NOT_INITIALIZED ||
                      status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
                      status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
  return ocp_fail(error, passes ? ORT_FAIL : ORT_RUNTIME_EXCEPTION, "%s failed: %s", what,
                  ocp_dnn.GetErrorString(status));
}

cudnnBackendDescriptor_t ocp_dnn_make_tensor(ocp_dnn_builder *b, const ocp_dnn_tensor *t) {
  const bool yes = true;
  cudnnBackendDescriptor_t tensor = ocp_dnn_create(b, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  ocp_dnn_set(b, tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &t->type);
  ocp_dnn_set(b, tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, t->rank, t->dims);
  ocp_dnn_set(b, tensor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, t->rank, t->strides);
  ocp_dnn_set(b, tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &t->number);
  ocp_dnn_set(b, tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &t->alignment);
  if (t->is_virtual)
    ocp_dnn_set(b, tensor, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
  if (t->is_by_value)
    ocp_dnn_set(b, tensor, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
  ocp_dnn_finalize(b, tensor);
  return tensor;
}

cudnnBackendDescriptor_t ocp_dnn_make_pointwise(ocp_dnn_builder *b, int mode, double most, cudnnBackendDescriptor_t x,
                                                cudnnBackendDescriptor_t other, cudnnBackendDescriptor_t result) {
  const int precision = CUDNN_DATA_FLOAT, nan = CUDNN_PROPAGATE_NAN, descriptor = CUDNN_TYPE_BACKEND_DESCRIPTOR;
  cudnnBackendDescriptor_t pointwise = ocp_dnn_create(b, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  ocp_dnn_set(b, pointwise, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  ocp_dnn_set(b, pointwise, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &precision);
  if (mode == CUDNN_POINTWISE_RELU_FWD)
    ocp_dnn_set(b, pointwise, CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, 1, &nan);
  if (most > 0)
    ocp_dnn_set(b, pointwise, CUDNN_ATTR_POINTWISE_RELU_UPPER_CLIP, CUDNN_TYPE_DOUBLE, 1, &most);
  ocp_dnn_finalize(b, pointwise);
  cudnnBackendDescriptor_t operation = ocp_dnn_create(b, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, descriptor, 1, &pointwise);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, descriptor, 1, &x);
  if (other)
    ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, descriptor, 1, &other);
  ocp_dnn_set(b, operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, descriptor, 1, &result);
  ocp_dnn_finalize(b, operation);
  return operation;
}

cudnnBackendDescriptor_t ocp_dnn_make_graph(ocp_dnn_builder *b, const cudnnBackendDescriptor_t *operations,
                                            uint32_t count) {
  cudnnBackendDescriptor_t graph = ocp_dnn_create(b, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  ocp_dnn_set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, operations);
  ocp_dnn_finalize(b, graph);
  return graph;
}

int64_t ocp_dnn_alignment(const void *address) {
  const uint64_t bits = (uint64_t)(uintptr_t)address | MAX_ALIGNMENT;
  return (int64_t)(bits & -bits);
}

size_t ocp_dnn_version(void) { return ocp_dnn.GetVersion(); }

/* Checks the version of cuDNN: from 9.8 on, an execution plan can outlive the handle with which it was made. */
int ocp_dnn_check(ocp_error *error) {
  const size_t version = ocp_dnn.GetVersion(), least = 90800;
  return version >= least ? ORT_OK
                          : ocp_fail(error, ORT_FAIL,
                                     "cuDNN %zu.%zu.%zu is too old, expected 9.8 or newer. Upgrade nvidia-cudnn-cu13",
                                     version / 10000, version / 100 % 100, version % 100);
}

int ocp_dnn_open(void **handle, ocp_error *error) {
  const cudnnStatus_t status = ocp_dnn.Create((cudnnHandle_t *)handle);
  return status ? fail(error, status, "cudnnCreate") : ORT_OK;
}

void ocp_dnn_close(void *handle) { ocp_dnn.Destroy(handle); }

int ocp_dnn_data_type(uint32_t dtype) {
  switch (dtype) {
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    return CUDNN_DATA_HALF;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
    return CUDNN_DATA_BFLOAT16;
  case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    return CUDNN_DATA_DOUBLE;
  default:
    return CUDNN_DATA_FLOAT;
  }
}

/* Makes the descriptor of the device for which execution plans are made. */
static cudnnBackendDescriptor_t make_device(ocp_dnn_builder *b, int32_t ordinal) {
  cudnnBackendDescriptor_t device = ocp_dnn_create(b, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  ocp_dnn_set(b, device, CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, 1, &ordinal);
  ocp_dnn_finalize(b, device);
  return device;
}

/* Whether the engine is precompiled; cuDNN takes seconds to compile another engine at run time. True if cuDNN does not
 * say. */
static bool is_compiled(cudnnBackendDescriptor_t engine) {
  int64_t count = 0;
  int notes[MAX_NOTES] = {0};
  if (ocp_dnn.BackendGetAttribute(engine, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE, MAX_NOTES, &count,
                                  notes))
    return true;
  for (int64_t i = 0; i < count && i < MAX_NOTES; i++)
    if (notes[i] == CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION)
      return false;
  return true;
}

/* Whether the engine of a configuration obeys the problem's flags. *tensor_cores: whether the engine uses tensor
 * cores and is precompiled; if no precompiled engine has the problem's activation, whether it uses tensor cores. */
static bool engine_allowed(const ocp_problem_spec *spec, cudnnBackendDescriptor_t config, bool *tensor_cores) {
  cudnnBackendDescriptor_t engine = NULL;
  int64_t count = 0;
  int notes[MAX_NOTES] = {0};
  if (ocp_dnn.BackendCreateDescriptor(CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine))
    return false;
  bool allowed = !ocp_dnn.BackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                              &count, &engine) &&
                 !ocp_dnn.BackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                              MAX_NOTES, &count, notes);
  const bool exact = spec->dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && !(spec->flags & OCP_PROBLEM_TF32);
  *tensor_cores = false;
  for (int64_t i = 0; allowed && i < count && i < MAX_NOTES; i++) {
    *tensor_cores |= notes[i] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
    const bool inexact = notes[i] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE && exact;
    const bool changing = notes[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC && spec->flags & OCP_PROBLEM_DETERMINISTIC;
    allowed = !inexact && !changing && notes[i] != CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS &&
              notes[i] != CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION;
  }
  /* cuDNN has no precompiled engine with these activations. */
  const bool compiles = spec->kind == OCP_PROBLEM_CONV && spec->flags & (OCP_PROBLEM_SWISH | OCP_PROBLEM_RELU6);
  *tensor_cores = *tensor_cores && (compiles || is_compiled(engine));
  ocp_dnn.BackendDestroyDescriptor(engine);
  return allowed;
}

/* Makes the execution plan of one engine configuration; NULL if the engine does not support the graph, or needs a
 * workspace of more than `most` bytes. */
static cudnnBackendDescriptor_t try_config(cudnnBackendDescriptor_t device, cudnnBackendDescriptor_t config,
                                           uint64_t most) {
  cudnnBackendDescriptor_t plan = NULL;
  int64_t count = 0, workspace = 0;
  if (ocp_dnn.BackendCreateDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan))
    return NULL;
  if (!ocp_dnn.BackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                   &device) &&
      !ocp_dnn.BackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                   &config) &&
      !ocp_dnn.BackendFinalize(plan) &&
      !ocp_dnn.BackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                                   &workspace) &&
      workspace >= 0 && (uint64_t)workspace <= most)
    return plan;
  ocp_dnn.BackendDestroyDescriptor(plan);
  return NULL;
}

/* Makes execution plans of the engine configurations that a heuristic mode proposes, in its order. Skips *rank of them,
 * decrements *rank for each, and returns the next; NULL if there are not enough. in_two_rounds: configurations for
 * which engine_allowed sets *tensor_cores come first. */
static cudnnBackendDescriptor_t search(ocp_dnn_builder *b, const ocp_problem_spec *spec,
                                       cudnnBackendDescriptor_t device, cudnnBackendDescriptor_t graph, int mode,
                                       uint64_t workspace, bool in_two_rounds, uint32_t *rank) {
  cudnnBackendDescriptor_t heuristic = ocp_dnn_create(b, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR), configs[MAX_CONFIGS],
                           plan = NULL;
  ocp_dnn_set(b, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
  ocp_dnn_set(b, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  ocp_dnn_set(b, heuristic, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
  ocp_dnn_finalize(b, heuristic);
  for (int i = 0; i < MAX_CONFIGS; i++)
    configs[i] = ocp_dnn_create(b, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  int64_t found = 0;
  if (!b->status)
    ocp_dnn_note(b,
                 ocp_dnn.BackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                             MAX_CONFIGS, &found, configs),
                 "cudnnBackendGetAttribute");
  found = b->status ? 0 : found < MAX_CONFIGS ? found : MAX_CONFIGS;
  for (int64_t i = 0; !plan && i < (in_two_rounds ? 2 * found : found); i++) {
    bool tensor_cores = false;
    if (engine_allowed(spec, configs[i % found], &tensor_cores) && (!in_two_rounds || tensor_cores == (i < found)))
      plan = try_config(device, configs[i % found], workspace);
    if (plan && *rank > 0) {
      (*rank)--;
      ocp_dnn.BackendDestroyDescriptor(plan);
      plan = NULL;
    }
  }
  return plan;
}

void ocp_dnn_release(void *algorithm) {
  ocp_dnn_plan *conv = algorithm;
  if (!conv)
    return;
  if (conv->plan)
    ocp_dnn.BackendDestroyDescriptor(conv->plan);
  while (conv->num_descriptors)
    ocp_dnn.BackendDestroyDescriptor(conv->descriptors[--conv->num_descriptors]);
  free(conv);
}

int ocp_dnn_find(ocp_dnn_builder *b, const ocp_problem_spec *spec, const ocp_library_handle *handle,
                 cudnnBackendDescriptor_t graph, uint64_t workspace, bool tensor_cores, uint32_t rank, void **algorithm,
                 ocp_error *error) {
  const bool may_be_missing = rank > 0;
  ocp_dnn_plan *conv = b->conv;
  cudnnBackendDescriptor_t device = make_device(b, handle->ordinal);
  const int modes[] = {spec->flags & OCP_PROBLEM_BRIEF ? CUDNN_HEUR_MODE_INSTANT : CUDNN_HEUR_MODE_A,
                       CUDNN_HEUR_MODE_FALLBACK};
  for (int i = 0; i < 2 && !b->status && !conv->plan; i++)
    conv->plan = search(b, spec, device, graph, modes[i], workspace, tensor_cores, &rank);
  if (conv->plan) {
    *algorithm = conv;
    return ORT_OK;
  }
  ocp_dnn_release(conv);
  if (!b->status && may_be_missing)
    return ORT_OK;
  return b->status ? fail(error, b->status, b->failed)
                   : ocp_fail(error, ORT_RUNTIME_EXCEPTION,
                              "cuDNN has no engine for this operation in the requested precision");
}

/* ---- plans as text ---- */

bool ocp_dnn_identify(const ocp_library_handle *handle, char *text, uint64_t bytes) {
  ocp_dnn_plan none = {0};
  ocp_dnn_builder b = {.conv = &none};
  cudnnBackendDescriptor_t device = make_device(&b, handle->ordinal);
  const int start = snprintf(text, bytes, "%zu ", ocp_dnn.GetVersion());
  const int64_t room = (int64_t)bytes - start - 1;
  int64_t count = 0;
  if (!b.status)
    ocp_dnn_note(&b,
                 ocp_dnn.BackendGetAttribute(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, room,
                                             &count, text + start),
                 "cudnnBackendGetAttribute");
  if (device)
    ocp_dnn.BackendDestroyDescriptor(device);
  if (b.status || count <= 0 || count > room)
    return false;
  text[start + count] = 0;
  return true;
}

char *ocp_dnn_save(const void *algorithm, uint64_t *bytes) {
  const ocp_dnn_plan *conv = algorithm;
  const int attribute = CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION;
  int64_t needed = 0, count = 0;
  if (ocp_dnn.BackendGetAttribute(conv->plan, attribute, CUDNN_TYPE_CHAR, 0, &needed, NULL) || needed <= 0)
    return NULL;
  char *data = malloc((size_t)needed);
  if (data && (ocp_dnn.BackendGetAttribute(conv->plan, attribute, CUDNN_TYPE_CHAR, needed, &count, data) ||
               count <= 0 || count > needed)) {
    free(data);
    return NULL;
  }
  *bytes = (uint64_t)count;
  return data;
}

void *ocp_dnn_load(const ocp_library_handle *handle, const char *data, uint64_t bytes, uint64_t workspace) {
  ocp_dnn_plan *conv = calloc(1, sizeof *conv);
  if (!conv)
    return NULL;
  ocp_dnn_builder b = {.conv = conv};
  cudnnBackendDescriptor_t device = make_device(&b, handle->ordinal);
  cudnnBackendDescriptor_t plan = ocp_dnn_create(&b, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  ocp_dnn_set(&b, plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
  ocp_dnn_set(&b, plan, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)bytes, data);
  ocp_dnn_finalize(&b, plan);
  int64_t count = 0, needed = -1;
  if (!b.status)
    ocp_dnn_note(&b,
                 ocp_dnn.BackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                             &count, &needed),
                 "cudnnBackendGetAttribute");
  if (b.status || needed < 0 || (uint64_t)needed > workspace) {
    ocp_dnn_release(conv);
    return NULL;
  }
  conv->plan = conv->descriptors[--conv->num_descriptors]; /* the plan was made last, and is destroyed first */
  return conv;
}

int ocp_dnn_execute(void *handle, const void *algorithm, CUstream stream, uint32_t count, const int64_t *numbers,
                    void *const *pointers, void *const *workspace, ocp_error *error) {
  const ocp_dnn_plan *conv = algorithm;
  cudnnBackendDescriptor_t pack = NULL;
  ocp_dnn_builder b = {0};
  ocp_dnn_note(&b, ocp_dnn.SetStream(handle, stream), "cudnnSetStream");
  if (!b.status)
    ocp_dnn_note(&b, ocp_dnn.BackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack),
                 "cudnnBackendCreateDescriptor");
  ocp_dnn_set(&b, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, numbers);
  ocp_dnn_set(&b, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers);
  ocp_dnn_set(&b, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, workspace);
  ocp_dnn_finalize(&b, pack);
  if (!b.status)
    ocp_dnn_note(&b, ocp_dnn.BackendExecute(handle, conv->plan, pack), "cudnnBackendExecute");
  if (pack)
    ocp_dnn.BackendDestroyDescriptor(pack);
  return b.status ? fail(error, b.status, b.failed) : ORT_OK;
}
