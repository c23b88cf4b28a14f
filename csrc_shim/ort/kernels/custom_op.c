#include "ort/kernels/custom_op.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "python/host.h"

typedef struct custom_op {
  OrtCustomOp ort; /* first member: ORT's view */
  int64_t handle;  /* Python's handle of the operator */
  char *name;
  int since;
  uint32_t num_inputs, num_outputs;
  struct custom_op *earlier; /* next entry of `known`, the list of all operators ever made */
  ocp_custom_port ports[];   /* inputs, then outputs */
} custom_op;

static _Atomic(custom_op *) known;

static const custom_op *self(const OrtCustomOp *op) { return (const custom_op *)(const void *)op; }

static const ocp_custom_port *input(const OrtCustomOp *op, size_t index) { return &self(op)->ports[index]; }

static const ocp_custom_port *output(const OrtCustomOp *op, size_t index) {
  return &self(op)->ports[self(op)->num_inputs + index];
}

static const ocp_custom_port *last_input(const OrtCustomOp *op) { return input(op, self(op)->num_inputs - 1); }
static const ocp_custom_port *last_output(const OrtCustomOp *op) { return output(op, self(op)->num_outputs - 1); }

static const char *get_name(const OrtCustomOp *op) { return self(op)->name; }
static const char *get_provider(const OrtCustomOp *op) {
  (void)op;
  return "CPUExecutionProvider";
}
static size_t get_input_count(const OrtCustomOp *op) { return self(op)->num_inputs; }
static size_t get_output_count(const OrtCustomOp *op) { return self(op)->num_outputs; }
static ONNXTensorElementDataType get_input_type(const OrtCustomOp *op, size_t index) {
  return (ONNXTensorElementDataType)input(op, index)->dtype;
}
static ONNXTensorElementDataType get_output_type(const OrtCustomOp *op, size_t index) {
  return (ONNXTensorElementDataType)output(op, index)->dtype;
}
static OrtCustomOpInputOutputCharacteristic get_input_kind(const OrtCustomOp *op, size_t index) {
  return (OrtCustomOpInputOutputCharacteristic)input(op, index)->kind;
}
static OrtCustomOpInputOutputCharacteristic get_output_kind(const OrtCustomOp *op, size_t index) {
  return (OrtCustomOpInputOutputCharacteristic)output(op, index)->kind;
}
static OrtMemType get_input_memory(const OrtCustomOp *op, size_t index) {
  (void)op, (void)index;
  return OrtMemTypeDefault;
}
static int get_least_inputs(const OrtCustomOp *op) { return (int)last_input(op)->minimum; }
static int get_least_outputs(const OrtCustomOp *op) { return (int)last_output(op)->minimum; }
static int are_inputs_homogeneous(const OrtCustomOp *op) { return last_input(op)->is_homogeneous; }
static int are_outputs_homogeneous(const OrtCustomOp *op) { return last_output(op)->is_homogeneous; }
static int get_start_version(const OrtCustomOp *op) { return self(op)->since; }

/* ---- the kernel of declined nodes ---- */

static OrtStatus *create_kernel(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
  (void)api;
  *kernel = NULL;
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  return python ? ocp_python_status(python->explain_custom_op(self(op)->handle, info)) : ocp_status(&error);
}

static OrtStatus *compute_kernel(void *kernel, OrtKernelContext *context) {
  (void)kernel, (void)context;
  return ocp_api->CreateStatus(ORT_NOT_IMPLEMENTED,
                               "an application's custom operator has no kernel in the CPU provider");
}

static void *create_old_kernel(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info) {
  (void)op, (void)api, (void)info;
  return NULL;
}
static void compute_old_kernel(void *kernel, OrtKernelContext *context) { (void)kernel, (void)context; }
static void destroy_kernel(void *kernel) { (void)kernel; }

/* ---- shapes ---- */

static OrtStatus *infer_shapes(const OrtCustomOp *op, OrtShapeInferContext *context) {
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  if (python) {
    python->infer_custom_op(self(op)->handle, context);
    ocp_python_returned();
  }
  return NULL; /* an unknown shape is not an error, and ORT would leak a status of this function */
}

const OrtCustomOp *ocp_custom_op_create(const ocp_custom_op_spec *spec, ocp_error *error) {
  const size_t num_ports = (size_t)spec->num_inputs + spec->num_outputs;
  custom_op *op = calloc(1, sizeof *op + num_ports * sizeof *op->ports);
  char *name = strdup(spec->name);
  if (!op || !name) {
    free(op);
    free(name);
    ocp_fail_memory(error);
    return NULL;
  }
  op->handle = spec->handle;
  op->name = name;
  op->since = (int)spec->since;
  op->num_inputs = spec->num_inputs;
  op->num_outputs = spec->num_outputs;
  memcpy(op->ports, spec->ports, num_ports * sizeof *op->ports);
  op->ort = (OrtCustomOp){
      .version = ocp_api_version,
      .CreateKernel = create_old_kernel,
      .GetName = get_name,
      .GetExecutionProviderType = get_provider,
      .GetInputType = get_input_type,
      .GetInputTypeCount = get_input_count,
      .GetOutputType = get_output_type,
      .GetOutputTypeCount = get_output_count,
      .KernelCompute = compute_old_kernel,
      .KernelDestroy = destroy_kernel,
      .GetInputCharacteristic = get_input_kind,
      .GetOutputCharacteristic = get_output_kind,
      .GetInputMemoryType = get_input_memory,
      .GetVariadicInputMinArity = get_least_inputs,
      .GetVariadicInputHomogeneity = are_inputs_homogeneous,
      .GetVariadicOutputMinArity = get_least_outputs,
      .GetVariadicOutputHomogeneity = are_outputs_homogeneous,
      .CreateKernelV2 = create_kernel,
      .KernelComputeV2 = compute_kernel,
      .InferOutputShapeFn = infer_shapes,
      .GetStartVersion = get_start_version,
  };
  op->earlier = atomic_load(&known);
  while (!atomic_compare_exchange_weak(&known, &op->earlier, op))
    ;
  return &op->ort;
}
