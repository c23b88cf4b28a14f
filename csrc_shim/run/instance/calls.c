#include "run/instance/calls.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/counters.h"
#include "base/dtype.h"
#include "device/device.h"
#include "driver/activity.h"
#include "plan/load.h"
#include "run/instance/host_values.h"
#include "run/instance/uploads.h"
#include "vendor/problem.h"

/* ---- references to memory ---- */

/* Returns the size in bytes of the tensor or buffer that a reference names. */
static uint64_t ref_bytes(const ocp_instance *instance, uint32_t kind, uint32_t index) {
  const ocp_plan *plan = instance->variant->plan;
  switch (kind) {
  case OCP_REF_INPUT:
    return instance->memory_bytes[index];
  case OCP_REF_OUTPUT:
    return instance->memory_bytes[plan->header.num_inputs + index];
  case OCP_REF_WEIGHT:
    return instance->variant->weight_bytes[index];
  default:
    return (uint64_t)instance->registers[plan->buffers[index].size_register];
  }
}

/* Returns the index into `bases` of the memory that a reference names (ocp_fixup.base); *offset: offset from that
 * base. */
static uint32_t ref_base(const ocp_instance *instance, uint32_t kind, uint32_t index, uint64_t *offset) {
  const ocp_plan_header *h = &instance->variant->plan->header;
  *offset = 0;
  if (kind == OCP_REF_INPUT)
    return index;
  if (kind == OCP_REF_OUTPUT)
    return h->num_inputs + index;
  *offset = instance->buffer_offset[index];
  return h->num_inputs + h->num_outputs + instance->variant->plan->buffers[index].segment;
}

/* ---- parameters ---- */

static int fail_record(const ocp_instance *instance, uint32_t record, ocp_error *error, const char *what) {
  const ocp_plan *plan = instance->variant->plan;
  return ocp_fail(error, ORT_INVALID_ARGUMENT, "node '%.200s': %s",
                  ocp_plan_node_name(plan, plan->records[record].node), what);
}

/* Computes the value of a numeric parameter, as 64 bits; false if it does not fit the parameter's kind. Integers may be
 * signed or unsigned. */
static bool number(const ocp_plan_param *param, const int64_t *registers, uint64_t *value) {
  if (param->kind == OCP_PARAM_CONDITION) {
    *value = 0; /* graph_nodes.c sets the handle in a graph */
    return true;
  }
  const int64_t v = param->reg == OCP_NO_REG ? param->imm : registers[param->reg];
  *value = (uint64_t)v;
  switch (param->kind) {
  case OCP_PARAM_I8:
    return v >= INT8_MIN && v <= UINT8_MAX;
  case OCP_PARAM_I16:
    return v >= INT16_MIN && v <= UINT16_MAX;
  case OCP_PARAM_I32:
    return v >= INT32_MIN && v <= (int64_t)UINT32_MAX;
  default:
    return true;
  }
}

/* Resolves a pointer parameter: adds a fixup, or computes the final address of a weight. False if fewer than `needed`
 * valid bytes follow the address. */
static bool pointer(ocp_instance *instance, const ocp_plan_param *param, uint64_t needed, uint64_t *value,
                    ocp_fixup **next_fixup) {
  int64_t offset = param->imm;
  if (param->reg != OCP_NO_REG && __builtin_add_overflow(offset, instance->registers[param->reg], &offset))
    return false;
  const uint64_t bytes = ref_bytes(instance, param->ref_kind, param->ref_index);
  if (offset < 0 || (uint64_t)offset > bytes || needed > bytes - (uint64_t)offset)
    return false;
  if (param->ref_kind == OCP_REF_WEIGHT) {
    *value = instance->variant->weights[param->ref_index] + (uint64_t)offset;
    return true;
  }
  ocp_fixup *fixup = (*next_fixup)++;
  fixup->value = (uint32_t)(value - instance->values);
  fixup->base = ref_base(instance, param->ref_kind, param->ref_index, &fixup->offset);
  fixup->offset += (uint64_t)offset;
  return true;
}

/* Computes the grid and shared memory of a launch. A launch with an empty grid is skipped. */
static int fill_launch(ocp_instance *instance, uint32_t index, ocp_error *error) {
  static const int64_t max_grid[3] = {INT32_MAX, 65535, 65535};
  const ocp_plan_record *record = &instance->variant->plan->records[index];
  ocp_call *call = &instance->calls[index];
  for (int d = 0; d < 3; d++) {
    const int64_t size = instance->registers[record->grid[d]];
    if (size < 0 || size > max_grid[d])
      return fail_record(instance, index, error,
                         "the kernel's launch grid has a negative or too large size, expected at most 2^31-1 x 65535 x "
                         "65535 blocks. Check the shapes of the inputs");
    call->grid[d] = (unsigned)size;
    call->skipped |= size == 0;
  }
  const int64_t shared = record->shared_register == OCP_NO_REG ? 0 : instance->registers[record->shared_register];
  if (shared < 0 || shared > INT32_MAX)
    return fail_record(
        instance, index, error,
        "the size of the dynamic shared memory is negative or exceeds 2^31-1 bytes. Check the shapes of the "
        "inputs");
  call->shared_bytes = (unsigned)shared;
  return ORT_OK;
}

/* Checks the fill value of a memset, and computes the size in bytes of a copy, memset or upload. If the size is 0, the
 * record is skipped. The size of an upload is never 0 (plan/check.c). */
static int fill_move(ocp_instance *instance, uint32_t index, uint64_t *bytes, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_plan_param *params = plan->params + plan->records[index].first_param;
  uint64_t byte;
  if (plan->records[index].kind == OCP_RECORD_MEMSET &&
      (!number(&params[1], instance->registers, &byte) || byte > UINT8_MAX))
    return fail_record(instance, index, error,
                       "the value of a memset is not a byte, expected 0 to 255. Report the model");
  number(&params[2], instance->registers, bytes);
  instance->calls[index].skipped |= *bytes == 0;
  return ORT_OK;
}

/* Computes the values of a record's parameters, in order; for library calls and callbacks addresses come before
 * numbers. `needed` valid bytes must follow each address. */
static int fill_values(ocp_instance *instance, uint32_t index, uint64_t needed, ocp_fixup **next_fixup,
                       ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_plan_record *record = &plan->records[index];
  const ocp_plan_param *params = plan->params + record->first_param;
  ocp_call *call = &instance->calls[index];
  const bool apart = record->kind == OCP_RECORD_LIBRARY || record->kind == OCP_RECORD_CALL;
  uint32_t slot = 0;
  for (uint32_t i = 0; i < record->num_params; i++) {
    if (params[i].kind != OCP_PARAM_POINTER)
      continue;
    if (!pointer(instance, &params[i], needed, &call->values[apart ? slot : i], next_fixup))
      return fail_record(
          instance, index, error,
          "an address that a kernel, copy or call gets lies outside of its tensor. Check the shapes of the inputs, "
          "or report the model");
    slot++;
  }
  call->num_pointers = slot;
  for (uint32_t i = 0; i < record->num_params; i++) {
    if (params[i].kind == OCP_PARAM_POINTER)
      continue;
    if (!number(&params[i], instance->registers, &call->values[apart ? slot++ : i]))
      return fail_record(
          instance, index, error,
          "a size does not fit the integer type of a kernel's or call's parameter. Check the shapes of the inputs");
  }
  return ORT_OK;
}

static int fill_call(ocp_instance *instance, uint32_t index, ocp_fixup **next_fixup, ocp_error *error) {
  const ocp_plan_record *record = &instance->variant->plan->records[index];
  ocp_call *call = &instance->calls[index];
  uint64_t moved = 0;
  call->skipped = record->condition_register != OCP_NO_REG && instance->registers[record->condition_register] == 0;
  if (record->kind == OCP_RECORD_LAUNCH && fill_launch(instance, index, error) != ORT_OK)
    return error->code;
  if (record->kind == OCP_RECORD_LOOP)
    moved = sizeof(int32_t);
  if ((record->kind == OCP_RECORD_COPY || record->kind == OCP_RECORD_MEMSET || record->kind == OCP_RECORD_UPLOAD) &&
      fill_move(instance, index, &moved, error) != ORT_OK)
    return error->code;
  return call->skipped ? ORT_OK : fill_values(instance, index, moved, next_fixup, error);
}

int ocp_instance_fill_calls(ocp_instance *instance, uint32_t segment, ocp_error *error) {
  const ocp_segment_view *view = &instance->variant->plan->views[segment];
  ocp_fixup *const first = instance->fixups + view->pointers.first, *next = first;
  for (uint32_t i = view->records.first; i < view->records.first + view->records.count; i++)
    if (fill_call(instance, i, &next, error) != ORT_OK)
      return error->code;
  instance->num_fixups[segment] = (uint32_t)(next - first);
  instance->is_fresh = true;
  return ORT_OK;
}

/* ---- enqueueing ---- */

static int fail_call(const ocp_instance *instance, uint32_t index, CUresult result, ocp_error *error) {
  static const char *const what[OCP_RECORD_NUM_KINDS] = {"cuLaunchKernel", "cuMemcpyDtoDAsync", "cuMemsetD8Async",
                                                         "library call",   "callback",          "loop",
                                                         "upload",         "cuStreamWaitEvent"};
  const ocp_variant *variant = instance->variant;
  const ocp_plan_record *record = &variant->plan->records[index];
  char text[400];
  const bool launch = record->kind == OCP_RECORD_LAUNCH;
  snprintf(text, sizeof text, "node '%.200s': %s%s%.100s", ocp_plan_node_name(variant->plan, record->node),
           what[record->kind], launch ? " of " : "", launch ? variant->function_names[record->index] : "");
  return ocp_device_fail(variant->device, result, text, error);
}

void ocp_instance_set_pointers(ocp_instance *instance, uint32_t segment) {
  const ocp_fixup *fixups = instance->fixups + instance->variant->plan->views[segment].pointers.first;
  for (uint32_t i = 0; i < instance->num_fixups[segment]; i++)
    instance->values[fixups[i].value] = instance->bases[fixups[i].base] + fixups[i].offset;
}

void ocp_count_records(const ocp_record_counts *counts) {
  ocp_count(OCP_LAUNCHES, counts->records[OCP_RECORD_LAUNCH]);
  if (counts->records[OCP_RECORD_COPY])
    ocp_count(OCP_COPIES_D2D, counts->records[OCP_RECORD_COPY]);
  if (counts->records[OCP_RECORD_LIBRARY])
    ocp_count(OCP_LIBRARY_CALLS, counts->records[OCP_RECORD_LIBRARY]);
  if (counts->records[OCP_RECORD_UPLOAD]) {
    ocp_count(OCP_COPIES_H2D, counts->records[OCP_RECORD_UPLOAD]);
    ocp_count(OCP_WEIGHT_BYTES_STREAMED, counts->uploaded_bytes);
  }
  if (counts->records[OCP_RECORD_LOOP])
    ocp_count(OCP_DEVICE_LOOPS, counts->records[OCP_RECORD_LOOP]);
}

/* Prefixes the error of a failed call with the node's name. */
static int name_node(const ocp_instance *instance, uint32_t index, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_error reason = *error;
  return ocp_fail(error, reason.code, "node '%.200s': %.700s", ocp_plan_node_name(plan, plan->records[index].node),
                  reason.text);
}

static int call_back(const ocp_instance *instance, uint32_t index, ocp_stream *stream, ocp_error *error) {
  const ocp_variant *variant = instance->variant;
  const ocp_plan_record *record = &variant->plan->records[index];
  const ocp_call *call = &instance->calls[index];
  if (ocp_stream_is_recorded(stream)) {
    atomic_store(&stream->capture_failed, true);
    return ocp_fail(
        error, ORT_NOT_IMPLEMENTED,
        "a custom operator runs Python code in each Run, which a CUDA graph cannot capture. " OCP_WITHOUT_CAPTURE);
  }
  const int code = variant->calls[record->index](variant->handle, record->index, call->values, call->num_pointers,
                                                 (const int64_t *)call->values + call->num_pointers,
                                                 record->num_params - call->num_pointers, stream, error);
  if (code != ORT_OK && error->code == ORT_OK)
    ocp_fail(error, ORT_FAIL, "the operator's Python code failed without a message");
  return code;
}

static uint32_t num_values(const ocp_instance *instance, uint32_t index) {
  return instance->variant->plan->records[index].num_params - instance->calls[index].num_pointers;
}

/* Prepares all library calls of a segment with new sizes, on several threads for libraries that prepare slowly. */
static void prepare_libraries(ocp_instance *instance, ocp_range records, ocp_stream *stream) {
  const ocp_variant *variant = instance->variant;
  ocp_library_call *calls = calloc(records.count ? records.count : 1, sizeof *calls);
  uint32_t count = 0;
  for (uint32_t i = records.first; calls && i < records.first + records.count; i++) {
    const ocp_call *call = &instance->calls[i];
    if (call->kind == OCP_RECORD_LIBRARY && !call->skipped)
      calls[count++] = (ocp_library_call){.problem = variant->problems[variant->plan->records[i].index],
                                          .pointers = (void *const *)call->values,
                                          .num_pointers = call->num_pointers,
                                          .num_values = num_values(instance, i),
                                          .values = (const int64_t *)call->values + call->num_pointers};
  }
  if (count)
    ocp_library_prepare(calls, count, stream);
  free(calls);
}

/* The state of enqueueing one segment. */
typedef struct enqueueing {
  const ocp_instance *instance;
  ocp_stream *stream;
  bool named;               /* whether a profile or a capture wants the sources of the work */
  ocp_record_counts counts; /* of the records enqueued so far */
  ocp_uploads uploads;
  uint32_t depth; /* number of loops whose body is being enqueued */
  ocp_error *error;
} enqueueing;

static int enqueue(enqueueing *e, ocp_range records);

/* Enqueues the records of a loop once for each iteration. If the loop record has no count, the host reads the loop's
 * condition before each iteration. */
static int iterate(enqueueing *e, uint32_t index) {
  const ocp_plan_record *record = &e->instance->variant->plan->records[index];
  const bool counted = record->num_params == 2;
  const int64_t count = counted ? (int64_t)e->instance->calls[index].values[1] : 0;
  int64_t goes_on = 0;
  const ocp_host_read flag = {.device = e->instance->calls[index].values[0],
                              .dtype = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
                              .count = 1,
                              .values = &goes_on};
  e->uploads.is_level = false;
  for (int64_t i = 0;; i++) {
    int code = counted ? ORT_OK : ocp_host_values_read(e->stream, &flag, 1, e->error);
    if (code != ORT_OK)
      return name_node(e->instance, index, e->error);
    if (counted ? i >= count : !goes_on)
      return ORT_OK;
    ocp_count(OCP_DEVICE_LOOP_ITERATIONS, !counted);
    code = enqueue(e, (ocp_range){index + 1, record->index});
    if (code != ORT_OK)
      return code;
  }
}

/* Enqueues a loop. Does not count the loops in its body for OCP_DEVICE_LOOPS, because in a CUDA graph the host does not
 * know how often they run. */
static int repeat(enqueueing *e, uint32_t index) {
  e->counts.records[OCP_RECORD_LOOP] += e->depth == 0;
  e->depth++;
  const int code = iterate(e, index);
  e->depth--;
  return code;
}

static int enqueue(enqueueing *e, ocp_range records) {
  const ocp_instance *instance = e->instance;
  const ocp_variant *variant = instance->variant;
  const ocp_plan *plan = variant->plan;
  const ocp_driver *driver = variant->device->driver;
  ocp_stream *stream = e->stream;
  ocp_error *error = e->error;
  CUresult result = CUDA_SUCCESS;
  int code = ORT_OK;
  for (uint32_t i = records.first; i < records.first + records.count; i++) {
    const ocp_plan_record *record = &plan->records[i];
    const ocp_call *call = &instance->calls[i];
    if (call->skipped)
      continue;
    if (e->named)
      ocp_activity_of(variant->first_source + i);
    const uint64_t *values = call->values;
    switch (call->kind) {
    case OCP_RECORD_LOOP:
      code = repeat(e, i);
      if (code != ORT_OK)
        return code;
      i += record->index;
      continue;
    case OCP_RECORD_LAUNCH:
      result = driver->LaunchKernel(variant->functions[record->index], call->grid[0], call->grid[1], call->grid[2],
                                    record->block[0], record->block[1], record->block[2], call->shared_bytes,
                                    stream->handle, call->params, NULL);
      break;
    case OCP_RECORD_COPY:
      if (values[0] == values[1]) /* ORT bound the copy's output to the memory of its input */
        continue;
      result = driver->MemcpyDtoDAsync(values[0], values[1], values[2], stream->handle);
      break;
    case OCP_RECORD_MEMSET:
      result = driver->MemsetD8Async(values[0], (unsigned char)values[1], values[2], stream->handle);
      break;
    case OCP_RECORD_CALL:
      code = call_back(instance, i, stream, error);
      if (code != ORT_OK)
        name_node(instance, i, error);
      break;
    case OCP_RECORD_UPLOAD:
      code = ocp_uploads_copy(&e->uploads, values[0], values[1], values[2], error);
      if (code != ORT_OK)
        name_node(instance, i, error);
      e->counts.uploaded_bytes += (int64_t)values[2];
      break;
    case OCP_RECORD_AWAIT:
      result = ocp_uploads_await(&e->uploads);
      break;
    default:
      code =
          ocp_library_run(variant->problems[record->index], stream, (void *const *)values, call->num_pointers,
                          (const int64_t *)values + call->num_pointers, record->num_params - call->num_pointers, error);
      if (code != ORT_OK)
        name_node(instance, i, error);
    }
    if (result != CUDA_SUCCESS)
      code = fail_call(instance, i, result, error);
    if (code != ORT_OK)
      break;
    if (call->kind != OCP_RECORD_UPLOAD)
      e->uploads.is_level = false;
    e->counts.records[call->kind]++;
  }
  return code;
}

int ocp_instance_enqueue(ocp_instance *instance, uint32_t segment, ocp_stream *stream, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range records = plan->views[segment].records;
  const bool is_capturing = atomic_load_explicit(&stream->capturing, memory_order_relaxed);
  if (plan->has_open_loops && (is_capturing || (!stream->owned && ocp_stream_is_captured(stream)))) {
    atomic_store(&stream->capture_failed, true);
    return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                    "%.200s: the host must read before each iteration of a loop whether the loop continues, and a CUDA "
                    "graph cannot capture that. " OCP_WITHOUT_CAPTURE,
                    instance->variant->cluster_name);
  }
  ocp_instance_set_pointers(instance, segment);
  if (instance->is_fresh && plan->header.num_problems)
    prepare_libraries(instance, records, stream);
  instance->is_fresh = false;
  /* A capture records the sources even without an open profile: the graph keeps them for later profiles. */
  enqueueing e = {.instance = instance,
                  .stream = stream,
                  .named = ocp_is_anybody_listening() || is_capturing,
                  .uploads = {.run = stream, .most_in_flight = plan->uploads_in_flight},
                  .error = error};
  const int code = enqueue(&e, records);
  ocp_uploads_end(&e.uploads);
  if (e.named)
    ocp_activity_of(0);
  ocp_count_records(&e.counts);
  return code;
}

int ocp_instance_locate(const ocp_instance *instance, const ocp_plan_readback *readback, CUdeviceptr *address,
                        ocp_error *error) {
  const int64_t offset =
      readback->byte_offset_register == OCP_NO_REG ? 0 : instance->registers[readback->byte_offset_register];
  const uint64_t bytes = ref_bytes(instance, readback->ref_kind, readback->ref_index);
  const uint64_t needed = (uint64_t)readback->count * (ocp_dtype_bits(readback->dtype) / 8);
  if (offset < 0 || (uint64_t)offset > bytes || needed > bytes - (uint64_t)offset)
    return ocp_fail(
        error, ORT_INVALID_ARGUMENT,
        "%s: internal error: a read-back of %llu bytes at offset %lld lies outside of its tensor of %llu bytes. "
        "Report the model",
        instance->variant->cluster_name, (unsigned long long)needed, (long long)offset, (unsigned long long)bytes);
  if (readback->ref_kind == OCP_REF_WEIGHT) {
    *address = instance->variant->weights[readback->ref_index] + (uint64_t)offset;
    return ORT_OK;
  }
  uint64_t base_offset;
  const uint32_t base = ref_base(instance, readback->ref_kind, readback->ref_index, &base_offset);
  *address = instance->bases[base] + base_offset + (uint64_t)offset;
  return ORT_OK;
}
