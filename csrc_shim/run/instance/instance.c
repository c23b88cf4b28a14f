/* Instances: a plan evaluated for one set of dimensions and host values, down to the parameters of every launch. */
#include "run/instance/instance.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "device/order.h"
#include "device/pool.h"
#include "plan/check.h"
#include "plan/expr.h"
#include "plan/format.h"
#include "plan/load.h"
#include "plan/slab.h"
#include "run/instance/calls.h"

/* ---- memory ---- */

/* Takes the next `count` elements from the single allocation of an instance. If `block` is NULL, only adds their size
 * in bytes to *position. */
static void *carve(char *block, size_t *position, size_t count, size_t element) {
  void *array = block ? block + *position : NULL;
  *position += (count * element + 15) & ~(size_t)15;
  return array;
}

/* Lays out the arrays of an instance in its allocation (`block`; NULL: only computes the size), and returns the
 * allocation's size in bytes. The loader bounds the counts, so the sum cannot overflow. */
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
  instance->targets = carve(block, &position, h->num_outputs, sizeof *instance->targets);
  instance->scratch = carve(block, &position, h->num_segments, sizeof *instance->scratch);
  instance->known_inputs = carve(block, &position, h->num_inputs, sizeof *instance->known_inputs);
  instance->is_redirected = carve(block, &position, h->num_outputs, sizeof *instance->is_redirected);
  instance->by_address = carve(block, &position, (size_t)h->num_inputs + h->num_outputs, sizeof *instance->by_address);
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
    for (uint32_t i = 0; i < h->num_inputs + h->num_outputs; i++)
      instance->by_address[i] = i;
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

/* Fails with the name of a node of the plan (of the cluster for OCP_NO_NODE), followed by the message. */
static int fail_node(const ocp_instance *instance, uint32_t node, ocp_error *error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static int fail_node(const ocp_instance *instance, uint32_t node, ocp_error *error, const char *format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (node == OCP_NO_NODE)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "%.200s: %s", instance->variant->cluster_name, text);
  return ocp_fail(error, ORT_INVALID_ARGUMENT, "node '%.200s': %s", ocp_plan_node_name(instance->variant->plan, node),
                  text);
}

/* Fails because an expression, whose operands are known, overflows or divides by zero. */
static int fail_arithmetic(const ocp_instance *instance, uint32_t expr, ocp_error *error) {
  static const char *const signs[OCP_EXPR_NUM_OPS] = {
      [OCP_EXPR_ADD] = "+",      [OCP_EXPR_SUB] = "-",     [OCP_EXPR_MUL] = "*",      [OCP_EXPR_FLOORDIV] = "/",
      [OCP_EXPR_TRUNCDIV] = "/", [OCP_EXPR_CEILDIV] = "/", [OCP_EXPR_MOD] = "modulo",
  };
  const ocp_plan_expr *e = &instance->variant->plan->exprs[expr];
  const long long a = instance->registers[e->a], b = instance->registers[e->b];
  const bool divides =
      e->op == OCP_EXPR_FLOORDIV || e->op == OCP_EXPR_TRUNCDIV || e->op == OCP_EXPR_CEILDIV || e->op == OCP_EXPR_MOD;
  return fail_node(instance, e->node, error,
                   "the computed size %lld %s %lld %s; check the shapes of the inputs and the values that decide sizes",
                   a, signs[e->op], b, divides && b == 0 ? "divides by zero" : "overflows 64 bits");
}

static int check_asserts(const ocp_instance *instance, uint32_t segment, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].asserts;
  for (uint32_t i = range.first; i < range.first + range.count; i++) {
    const ocp_plan_assert *a = &plan->asserts[i];
    if (instance->registers[a->reg] == 0)
      return fail_node(instance, a->node, error, "%s", plan->strings + a->message);
  }
  return ORT_OK;
}

/* Fails because expression `failed` of a segment has no value. If an assertion forbids these inputs, its error is
 * better, since it names the node. So assertions are checked first. Expressions that depend on `failed` get the value
 * 1, so that assertions about them hold. */
static int fail_evaluation(ocp_instance *instance, uint32_t segment, uint32_t failed, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].exprs;
  bool *unknown = calloc(plan->header.num_registers, sizeof *unknown);
  if (!unknown)
    return fail_arithmetic(instance, failed, error);
  for (uint32_t i = failed; i < range.first + range.count; i++) {
    const ocp_plan_expr *e = &plan->exprs[i];
    const uint32_t operands[3] = {e->a, e->b, e->c};
    for (uint32_t k = 0; k < ocp_plan_num_operands(e->op); k++)
      unknown[e->dst] |= unknown[operands[k]];
    if (unknown[e->dst] || !ocp_expr_evaluate(e, instance->registers)) {
      unknown[e->dst] = true;
      instance->registers[e->dst] = 1;
    }
  }
  free(unknown);
  if (check_asserts(instance, segment, error) != ORT_OK)
    return error->code;
  return fail_arithmetic(instance, failed, error); /* the operands of `failed` have kept their values */
}

static int evaluate(ocp_instance *instance, uint32_t segment, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].exprs;
  for (uint32_t i = range.first; i < range.first + range.count; i++) {
    if (!ocp_expr_evaluate(&plan->exprs[i], instance->registers))
      return fail_evaluation(instance, segment, i, error);
  }
  return check_asserts(instance, segment, error);
}

/* Returns the size of a tensor in bytes; UINT64_MAX when a dimension is negative or the size overflows. */
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

/* Fails because an output's shape is impossible: a negative dimension, or too many bytes. */
static int fail_output(const ocp_instance *instance, uint32_t index, ocp_error *error) {
  const ocp_plan_output *out = &instance->variant->plan->outputs[index];
  char shape[OCP_MAX_RANK * 24] = "";
  size_t used = 0;
  for (uint32_t d = 0; d < out->rank; d++)
    used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%lld", d ? " x " : "",
                             (long long)instance->dims[out->first_dim + d]);
  return fail_node(
      instance, out->node, error,
      "the result would have the shape %s, with a negative dimension or with 2^60 bytes or more. Check the "
      "shapes of the inputs and the values that decide sizes",
      shape);
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
      return fail_output(instance, index, error);
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
    return ocp_fail_memory(error);
  bool ok = true;
  uint32_t largest = 0; /* the comparison is unsigned, so that a negative size is found as the largest */
  for (uint32_t i = 0; i < range.count; i++) {
    const uint32_t index = plan->buffer_order[range.first + i];
    const int64_t bytes = instance->registers[plan->buffers[index].size_register];
    ok = ok && bytes >= 0;
    items[i] = (ocp_slab_item){(uint64_t)bytes, plan->buffers[index].first_record, plan->buffer_last[index], 0};
    if (items[i].bytes > items[largest].bytes)
      largest = i;
  }
  const uint32_t largest_record = items[largest].first;
  const long long largest_bytes = (long long)items[largest].bytes;
  const uint64_t total = ok ? ocp_slab_pack(items, range.count) : OCP_SLAB_OVERFLOW;
  for (uint32_t i = 0; i < range.count; i++)
    instance->buffer_offset[plan->buffer_order[range.first + i]] = items[i].offset;
  free(items);
  if (total == OCP_SLAB_NO_MEMORY)
    return ocp_fail_memory(error);
  if (total == OCP_SLAB_OVERFLOW)
    return fail_node(instance, plan->records[largest_record].node, error,
                     "the size of an intermediate tensor, %lld bytes, is negative or too large; check the shapes of "
                     "the inputs and the values that decide sizes",
                     largest_bytes);
  instance->slab_bytes[segment] = total;
  return ORT_OK;
}

/* ---- creation ---- */

int ocp_instance_resolve(ocp_instance *instance, uint32_t segment, ocp_error *error) {
  if (evaluate(instance, segment, error) != ORT_OK || measure_outputs(instance, segment, error) != ORT_OK ||
      lay_out_slab(instance, segment, error) != ORT_OK)
    return error->code;
  return ocp_instance_fill_calls(instance, segment, error);
}

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
      return ocp_fail(error, ORT_INVALID_ARGUMENT, "%s: input %u has a negative dimension, or 2^60 bytes or more",
                      instance->variant->cluster_name, i);
  }
  return ORT_OK;
}

uint64_t ocp_instance_key_hash(const uint64_t *key, uint32_t words) {
  uint64_t hash = words;
  for (uint32_t i = 0; i < words; i++) {
    hash = (hash ^ key[i]) * UINT64_C(0x9E3779B97F4A7C15);
    hash ^= hash >> 29;
  }
  return hash;
}

ocp_instance *ocp_instance_create(const ocp_variant *variant, const ocp_input *inputs, const int64_t *host_values,
                                  const uint64_t *key, uint32_t key_words, ocp_error *error) {
  ocp_instance *instance = allocate(variant, key_words);
  if (!instance) {
    ocp_fail_memory(error);
    return NULL;
  }
  memcpy((uint64_t *)instance->key, key, key_words * sizeof *key);
  instance->hash = ocp_instance_key_hash(key, key_words);
  if (set_inputs(instance, inputs, host_values, error) == ORT_OK && guards_hold(instance) &&
      ocp_instance_resolve(instance, 0, error) == ORT_OK)
    return instance;
  free(instance);
  return NULL;
}

static bool same_calls(const ocp_instance *a, const ocp_instance *b) {
  const ocp_plan_header *h = &a->variant->plan->header;
  for (uint32_t i = 0; i < h->num_records; i++) {
    const ocp_call *x = &a->calls[i], *y = &b->calls[i];
    if (x->skipped != y->skipped || memcmp(x->grid, y->grid, sizeof x->grid) != 0 ||
        x->shared_bytes != y->shared_bytes || x->num_pointers != y->num_pointers)
      return false;
  }
  return true;
}

/* Whether the parameters are equal, except for the addresses that each Run sets. */
static bool same_values(const ocp_instance *a, const ocp_instance *b) {
  const uint32_t count = a->variant->plan->header.num_params;
  if (a->num_fixups[0] != b->num_fixups[0])
    return false;
  uint32_t first = 0;
  for (uint32_t i = 0; i <= a->num_fixups[0]; i++) {
    const bool is_last = i == a->num_fixups[0];
    if (!is_last && (a->fixups[i].value != b->fixups[i].value || a->fixups[i].base != b->fixups[i].base ||
                     a->fixups[i].offset != b->fixups[i].offset || a->fixups[i].value < first))
      return false;
    const uint32_t end = is_last ? count : a->fixups[i].value;
    if (memcmp(a->values + first, b->values + first, (end - first) * sizeof *a->values) != 0)
      return false;
    first = end + 1;
  }
  return true;
}

bool ocp_instance_become(ocp_instance *instance, const ocp_instance *other) {
  const ocp_plan_header *h = &instance->variant->plan->header;
  if (instance->variant != other->variant || instance->key_words != other->key_words || h->num_segments != 1)
    return false;
  if (memcmp(instance->dims, other->dims, h->num_dims * sizeof *other->dims) != 0 ||
      memcmp(instance->buffer_offset, other->buffer_offset, h->num_buffers * sizeof *other->buffer_offset) != 0 ||
      instance->slab_bytes[0] != other->slab_bytes[0] || !same_calls(instance, other) || !same_values(instance, other))
    return false;
  memcpy((uint64_t *)instance->key, other->key, other->key_words * sizeof *other->key);
  instance->hash = other->hash;
  memcpy(instance->registers, other->registers, h->num_registers * sizeof *other->registers);
  memcpy(instance->memory_bytes, other->memory_bytes, (h->num_inputs + h->num_outputs) * sizeof *other->memory_bytes);
  instance->aliasing_is_known = false;
  return true;
}

void ocp_instance_inherit(ocp_instance *instance, ocp_instance *from) {
  if (instance->variant != from->variant || from->used_again || instance->variant->plan->header.num_segments != 1)
    return;
  instance->warm_runs = from->warm_runs;
  instance->replay_evictions = from->replay_evictions;
  instance->replay_refused = from->replay_refused;
  instance->replay = from->replay;
  instance->release_replay = from->release_replay;
  instance->replay_stream_id = from->replay_stream_id;
  instance->replay_position = from->replay_position;
  instance->inherited = from->replay != NULL;
  from->replay = NULL;
  from->warm_runs = 0;
}

int ocp_instance_refusal(const ocp_variant *variant, const ocp_input *inputs, const int64_t *host_values,
                         ocp_error *error) {
  ocp_instance *instance = allocate(variant, 0);
  if (!instance)
    return ocp_fail_memory(error);
  if (set_inputs(instance, inputs, host_values, error) == ORT_OK)
    evaluate(instance, 0, error);
  free(instance);
  return error->code;
}

void ocp_instance_replayed(ocp_instance *instance, const ocp_stream *stream) {
  instance->replay_stream_id = stream->priv->id;
  instance->replay_position = ocp_stream_position(stream);
}

void ocp_instance_cool(ocp_instance *instance) {
  instance->warm_runs = 0;
  instance->replay_evictions += instance->replay_evictions < 16;
}

void ocp_instance_free(ocp_instance *instance) {
  if (!instance)
    return;
  if (instance->replay)
    instance->release_replay(instance->replay);
  free(instance);
}
