/* Instances: a plan evaluated for one set of dimensions and host values, down to the parameters of every launch. */
#include "instance.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expr.h"
#include "slab.h"

/* library.c; without it library records fail. */
int ocp_library_run(ocp_problem *problem, ocp_stream *stream, void *const *pointers, uint32_t count,
                    const int64_t *values, ocp_error *error);
#pragma weak ocp_library_run

/* ---- memory ---- */

/* Space for `count` elements in the one block of an instance; with a NULL block it only adds up the size. */
static void *carve(char *block, size_t *position, size_t count, size_t element) {
  void *array = block ? block + *position : NULL;
  *position += (count * element + 15) & ~(size_t)15;
  return array;
}

/* Counts are bounded by the loader (registers, and what the size of a blob can hold), so the sum cannot wrap. */
static size_t lay_out(ocp_instance *instance, char *block, const ocp_plan *plan, uint32_t key_words) {
  const ocp_plan_header *h = &plan->header;
  size_t position = 0;
  carve(block, &position, 1, sizeof *instance);
  instance->key = carve(block, &position, key_words, sizeof *instance->key);
  instance->registers = carve(block, &position, h->num_registers, sizeof *instance->registers);
  instance->dims = carve(block, &position, h->num_dims, sizeof *instance->dims);
  instance->memory_bytes = carve(block, &position, h->num_inputs + h->num_outputs, sizeof *instance->memory_bytes);
  instance->buffer_offset = carve(block, &position, h->num_buffers, sizeof *instance->buffer_offset);
  instance->slab_bytes = carve(block, &position, h->num_segments, sizeof *instance->slab_bytes);
  instance->calls = carve(block, &position, h->num_records, sizeof *instance->calls);
  const ocp_range last_pointers = plan->views[h->num_segments - 1].pointers;
  instance->fixups = carve(block, &position, last_pointers.first + last_pointers.count, sizeof *instance->fixups);
  instance->num_fixups = carve(block, &position, h->num_segments, sizeof *instance->num_fixups);
  instance->bases = carve(block, &position, h->num_inputs + h->num_outputs + h->num_segments, sizeof *instance->bases);
  instance->values = carve(block, &position, h->num_params, sizeof *instance->values);
  void **params = carve(block, &position, h->num_params, sizeof *params);
  if (block) {
    for (uint32_t i = 0; i < h->num_records; i++) {
      instance->calls[i].kind = plan->records[i].kind;
      instance->calls[i].values = instance->values + plan->records[i].first_param;
      instance->calls[i].params = params + plan->records[i].first_param;
    }
    for (uint32_t i = 0; i < h->num_params; i++)
      params[i] = &instance->values[i];
  }
  return position;
}

static ocp_instance *allocate(const ocp_variant *variant, uint32_t key_words) {
  ocp_instance sizes;
  const size_t bytes = lay_out(&sizes, NULL, variant->plan, key_words);
  ocp_instance *instance = calloc(1, bytes);
  if (!instance)
    return NULL;
  instance->variant = variant;
  instance->bytes = bytes;
  instance->key_words = key_words;
  lay_out(instance, (char *)instance, variant->plan, key_words);
  return instance;
}

/* ---- evaluation ---- */

static int fail_arithmetic(const ocp_variant *variant, ocp_error *error) {
  return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s: a size computed from the input shapes overflows or divides by zero",
                  variant->cluster_name);
}

static int check_asserts(const ocp_instance *instance, uint32_t segment, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].asserts;
  for (uint32_t i = range.first; i < range.first + range.count; i++) {
    const ocp_plan_assert *a = &plan->asserts[i];
    if (instance->registers[a->reg] == 0)
      return ocp_fail(error, ORT_INVALID_ARGUMENT, "node '%.200s': %.600s", ocp_plan_node_name(plan, a->node),
                      plan->strings + a->message);
  }
  return ORT_OK;
}

static int evaluate(ocp_instance *instance, uint32_t segment, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].exprs;
  for (uint32_t i = range.first; i < range.first + range.count; i++) {
    if (ocp_expr_evaluate(&plan->exprs[i], instance->registers))
      continue;
    /* An assertion may forbid just this and knows the node: those that can still be checked go first. */
    for (uint32_t k = i; k < range.first + range.count; k++)
      instance->registers[plan->exprs[k].dst] = 1;
    if (check_asserts(instance, segment, error) != ORT_OK)
      return error->code;
    return fail_arithmetic(instance->variant, error);
  }
  return check_asserts(instance, segment, error);
}

/* Bytes of a tensor; UINT64_MAX when a dimension is negative or the size overflows. */
static uint64_t tensor_bytes(const int64_t *dims, uint32_t rank, uint32_t dtype) {
  int64_t bits = ocp_dtype_bits(dtype);
  for (uint32_t d = 0; d < rank; d++)
    if (dims[d] < 0)
      return UINT64_MAX;
  for (uint32_t d = 0; d < rank; d++)
    if (dims[d] == 0)
      return 0;
  for (uint32_t d = 0; d < rank; d++)
    if (__builtin_mul_overflow(bits, dims[d], &bits))
      return UINT64_MAX;
  return ((uint64_t)bits + 7) / 8;
}

static int measure_outputs(ocp_instance *instance, uint32_t segment, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].outputs;
  for (uint32_t i = range.first; i < range.first + range.count; i++) {
    const uint32_t index = plan->output_order[i];
    const ocp_plan_output *out = &plan->outputs[index];
    int64_t *dims = instance->dims + out->first_dim;
    for (uint32_t d = 0; d < out->rank; d++)
      dims[d] = instance->registers[plan->dims[out->first_dim + d]];
    const uint64_t bytes = tensor_bytes(dims, out->rank, out->dtype);
    if (bytes == UINT64_MAX)
      return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s: output %u would have a negative dimension or too many bytes",
                      instance->variant->cluster_name, index);
    instance->memory_bytes[plan->header.num_inputs + index] = bytes;
  }
  return ORT_OK;
}

static int lay_out_slab(ocp_instance *instance, uint32_t segment, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].buffers;
  if (range.count == 0) {
    instance->slab_bytes[segment] = 0;
    return ORT_OK;
  }
  ocp_slab_item *items = malloc(range.count * sizeof *items);
  if (!items)
    return ocp_fail(error, ORT_FAIL, "not enough host memory");
  bool ok = true;
  for (uint32_t i = 0; i < range.count; i++) {
    const uint32_t index = plan->buffer_order[range.first + i];
    const int64_t bytes = instance->registers[plan->buffers[index].size_register];
    ok = ok && bytes >= 0;
    items[i] = (ocp_slab_item){(uint64_t)bytes, plan->buffers[index].first_record, plan->buffer_last[index], 0};
  }
  const uint64_t total = ok ? ocp_slab_pack(items, range.count) : UINT64_MAX;
  for (uint32_t i = 0; i < range.count; i++)
    instance->buffer_offset[plan->buffer_order[range.first + i]] = items[i].offset;
  free(items);
  if (total == UINT64_MAX)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s: the intermediate tensors would have too many bytes",
                    instance->variant->cluster_name);
  instance->slab_bytes[segment] = total;
  return ORT_OK;
}

/* ---- parameters ---- */

/* The size of what a reference names. */
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

/* The base that a reference is relative to (see ocp_fixup), and the offset of its memory from there. */
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

static int fail_record(const ocp_instance *instance, uint32_t record, ocp_error *error, const char *what) {
  const ocp_plan *plan = instance->variant->plan;
  return ocp_fail(error, ORT_INVALID_ARGUMENT, "node '%.200s': %s",
                  ocp_plan_node_name(plan, plan->records[record].node), what);
}

/* The value of a number, as the 8 bytes of a parameter; false when it does not fit its kind. Integers may be meant as
 * signed or unsigned. */
static bool number(const ocp_plan_param *param, const int64_t *registers, uint64_t *value) {
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

/* Resolves one pointer that at least `needed` bytes must follow: a fixup, or the final address of a weight. */
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

/* Grid and shared memory of a launch. An empty grid skips it. */
static int fill_launch(ocp_instance *instance, uint32_t index, ocp_error *error) {
  static const int64_t max_grid[3] = {INT32_MAX, 65535, 65535};
  const ocp_plan_record *record = &instance->variant->plan->records[index];
  ocp_call *call = &instance->calls[index];
  for (int d = 0; d < 3; d++) {
    const int64_t size = instance->registers[record->grid[d]];
    if (size < 0 || size > max_grid[d])
      return fail_record(instance, index, error, "the launch grid is out of range");
    call->grid[d] = (unsigned)size;
    call->skipped |= size == 0;
  }
  const int64_t shared = record->shared_register == OCP_NO_REG ? 0 : instance->registers[record->shared_register];
  if (shared < 0 || shared > INT32_MAX)
    return fail_record(instance, index, error, "the dynamic shared memory is out of range");
  call->shared_bytes = (unsigned)shared;
  return ORT_OK;
}

static int fill_call(ocp_instance *instance, uint32_t index, ocp_fixup **next_fixup, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_plan_record *record = &plan->records[index];
  const ocp_plan_param *params = plan->params + record->first_param;
  ocp_call *call = &instance->calls[index];
  call->skipped = record->condition_register != OCP_NO_REG && instance->registers[record->condition_register] == 0;
  uint64_t moved = 0;
  if (record->kind == OCP_RECORD_LAUNCH) {
    if (fill_launch(instance, index, error) != ORT_OK)
      return error->code;
  } else if (record->kind != OCP_RECORD_LIBRARY) {
    uint64_t unused;
    if (record->kind == OCP_RECORD_MEMSET && (!number(&params[1], instance->registers, &unused) || unused > UINT8_MAX))
      return fail_record(instance, index, error, "a memset with something else than a byte");
    number(&params[2], instance->registers, &moved);
    call->skipped |= moved == 0;
  }
  if (call->skipped)
    return ORT_OK;
  /* Library calls take pointers and numbers apart. */
  const bool apart = record->kind == OCP_RECORD_LIBRARY;
  uint32_t slot = 0;
  for (uint32_t i = 0; i < record->num_params; i++) {
    const bool is_pointer = params[i].kind == OCP_PARAM_POINTER;
    if (is_pointer && !pointer(instance, &params[i], moved, &call->values[apart ? slot : i], next_fixup))
      return fail_record(instance, index, error, "it would use memory outside a tensor");
    slot += is_pointer;
  }
  call->num_pointers = slot;
  for (uint32_t i = 0; i < record->num_params; i++) {
    if (params[i].kind == OCP_PARAM_POINTER)
      continue;
    if (!number(&params[i], instance->registers, &call->values[apart ? slot++ : i]))
      return fail_record(instance, index, error, "a size does not fit the kernel's parameter");
  }
  return ORT_OK;
}

int ocp_instance_resolve(ocp_instance *instance, uint32_t segment, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  if (evaluate(instance, segment, error) != ORT_OK || measure_outputs(instance, segment, error) != ORT_OK ||
      lay_out_slab(instance, segment, error) != ORT_OK)
    return error->code;
  const ocp_range records = plan->views[segment].records;
  instance->num_fixups[segment] = 0;
  ocp_fixup *const first = instance->fixups + plan->views[segment].pointers.first, *next = first;
  for (uint32_t i = records.first; i < records.first + records.count; i++)
    if (fill_call(instance, i, &next, error) != ORT_OK)
      return error->code;
  instance->num_fixups[segment] = (uint32_t)(next - first);
  return ORT_OK;
}

/* ---- creation ---- */

bool ocp_variant_accepts(const ocp_variant *variant, const ocp_input *inputs, uint32_t num_inputs,
                         const uint32_t *host_counts) {
  const ocp_plan *plan = variant->plan;
  if (num_inputs != plan->header.num_inputs)
    return false;
  for (uint32_t i = 0; i < num_inputs; i++) {
    const ocp_plan_input *in = &plan->inputs[i];
    if (in->dtype != inputs[i].dtype || in->rank != inputs[i].rank)
      return false;
    if (in->host_register != OCP_NO_REG && in->host_count != *host_counts++)
      return false;
  }
  return true;
}

static bool guards_hold(const ocp_instance *instance) {
  const ocp_plan *plan = instance->variant->plan;
  for (uint32_t i = 0; i < plan->num_guard_exprs; i++)
    if (!ocp_expr_evaluate(&plan->exprs[plan->guard_exprs[i]], instance->registers))
      return false;
  for (uint32_t i = 0; i < plan->header.num_guards; i++)
    if (instance->registers[plan->guards[i]] == 0)
      return false;
  return true;
}

static int set_inputs(ocp_instance *instance, const ocp_input *inputs, const int64_t *host_values, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  for (uint32_t i = 0; i < plan->header.num_inputs; i++) {
    const ocp_plan_input *in = &plan->inputs[i];
    for (uint32_t d = 0; d < in->rank; d++)
      instance->registers[in->first_register + d] = inputs[i].dims[d];
    for (uint32_t k = 0; k < in->host_count; k++)
      instance->registers[in->host_register + k] = *host_values++;
    instance->memory_bytes[i] = tensor_bytes(inputs[i].dims, in->rank, in->dtype);
    if (instance->memory_bytes[i] == UINT64_MAX)
      return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s: input %u has a negative dimension or too many bytes",
                      instance->variant->cluster_name, i);
  }
  return ORT_OK;
}

ocp_instance *ocp_instance_create(const ocp_variant *variant, const ocp_input *inputs, const int64_t *host_values,
                                  const uint64_t *key, uint32_t key_words, uint64_t hash, bool *matches,
                                  ocp_error *error) {
  *matches = false;
  ocp_instance *instance = allocate(variant, key_words);
  if (!instance) {
    ocp_fail(error, ORT_FAIL, "not enough host memory");
    return NULL;
  }
  memcpy((uint64_t *)instance->key, key, key_words * sizeof *key);
  instance->hash = hash;
  if (set_inputs(instance, inputs, host_values, error) == ORT_OK && guards_hold(instance)) {
    *matches = true;
    if (ocp_instance_resolve(instance, 0, error) == ORT_OK)
      return instance;
  }
  free(instance);
  return NULL;
}

/* ---- enqueueing ---- */

static int fail_call(const ocp_instance *instance, uint32_t index, CUresult result, ocp_error *error) {
  static const char *const what[OCP_RECORD_NUM_KINDS] = {"cuLaunchKernel", "cuMemcpyDtoDAsync", "cuMemsetD8Async",
                                                         "library call"};
  const ocp_variant *variant = instance->variant;
  const ocp_plan_record *record = &variant->plan->records[index];
  char text[400];
  const bool launch = record->kind == OCP_RECORD_LAUNCH;
  snprintf(text, sizeof text, "node '%.200s': %s%s%.100s", ocp_plan_node_name(variant->plan, record->node),
           what[record->kind], launch ? " of " : "", launch ? variant->function_names[record->index] : "");
  return ocp_device_fail(variant->device, result, text, error);
}

int ocp_instance_enqueue(ocp_instance *instance, uint32_t segment, ocp_stream *stream, ocp_error *error) {
  const ocp_variant *variant = instance->variant;
  const ocp_plan *plan = variant->plan;
  const ocp_driver *driver = variant->device->driver;
  const ocp_range records = plan->views[segment].records;
  const ocp_fixup *fixups = instance->fixups + plan->views[segment].pointers.first;
  for (uint32_t i = 0; i < instance->num_fixups[segment]; i++)
    instance->values[fixups[i].value] = instance->bases[fixups[i].base] + fixups[i].offset;
  int64_t counts[OCP_RECORD_NUM_KINDS] = {0};
  CUresult result = CUDA_SUCCESS;
  int code = ORT_OK;
  for (uint32_t i = records.first; i < records.first + records.count; i++) {
    const ocp_plan_record *record = &plan->records[i];
    const ocp_call *call = &instance->calls[i];
    if (call->skipped)
      continue;
    const uint64_t *values = call->values;
    switch (call->kind) {
    case OCP_RECORD_LAUNCH:
      result = driver->LaunchKernel(variant->functions[record->index], call->grid[0], call->grid[1], call->grid[2],
                                    record->block[0], record->block[1], record->block[2], call->shared_bytes,
                                    stream->handle, call->params, NULL);
      break;
    case OCP_RECORD_COPY:
      result = driver->MemcpyDtoDAsync(values[0], values[1], values[2], stream->handle);
      break;
    case OCP_RECORD_MEMSET:
      result = driver->MemsetD8Async(values[0], (unsigned char)values[1], values[2], stream->handle);
      break;
    default:
      code = !ocp_library_run
                 ? ocp_fail(error, ORT_NOT_IMPLEMENTED, "this build has no library calls")
                 : ocp_library_run(variant->problems[record->index], stream, (void *const *)values, call->num_pointers,
                                   (const int64_t *)values + call->num_pointers, error);
    }
    if (result != CUDA_SUCCESS)
      code = fail_call(instance, i, result, error);
    if (code != ORT_OK)
      break;
    counts[call->kind]++;
  }
  ocp_count(OCP_LAUNCHES, counts[OCP_RECORD_LAUNCH]);
  if (counts[OCP_RECORD_COPY])
    ocp_count(OCP_COPIES_D2D, counts[OCP_RECORD_COPY]);
  if (counts[OCP_RECORD_LIBRARY])
    ocp_count(OCP_LIBRARY_CALLS, counts[OCP_RECORD_LIBRARY]);
  return code;
}

int ocp_instance_locate(const ocp_instance *instance, const ocp_plan_readback *readback, CUdeviceptr *address,
                        ocp_error *error) {
  const int64_t offset =
      readback->byte_offset_register == OCP_NO_REG ? 0 : instance->registers[readback->byte_offset_register];
  const uint64_t bytes = ref_bytes(instance, readback->ref_kind, readback->ref_index);
  const uint64_t needed = (uint64_t)readback->count * (ocp_dtype_bits(readback->dtype) / 8);
  if (offset < 0 || (uint64_t)offset > bytes || needed > bytes - (uint64_t)offset)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s: a read-back lies outside its tensor",
                    instance->variant->cluster_name);
  if (readback->ref_kind == OCP_REF_WEIGHT) {
    *address = instance->variant->weights[readback->ref_index] + (uint64_t)offset;
    return ORT_OK;
  }
  uint64_t base_offset;
  const uint32_t base = ref_base(instance, readback->ref_kind, readback->ref_index, &base_offset);
  *address = instance->bases[base] + base_offset + (uint64_t)offset;
  return ORT_OK;
}
