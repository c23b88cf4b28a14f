/* Loading of plans. A blob may come from a file and is hostile until every count, index, range and register in it was
 * checked here; the executor relies on that and checks nothing of it again. */
#include "plan_load.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct checker {
  ocp_plan *plan;
  bool *defined; /* per register: defined in the segments looked at so far */
  ocp_error *error;
} checker;

static bool reject(checker *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool reject(checker *c, const char *format, ...) {
  char text[200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  ocp_fail(c->error, ORT_INVALID_GRAPH, "invalid plan: %s", text);
  return false;
}

const char *ocp_plan_node_name(const ocp_plan *plan, uint32_t node) { return plan->strings + plan->nodes[node]; }

/* ---- the blob's arrays ---- */

/* The next array of the blob. *position runs past the blob's end where the counts ask for more than it has; counts are
 * 32 bits and elements small, so that it cannot wrap around. */
static const void *take(const ocp_plan *p, uint64_t *position, uint32_t count, size_t element) {
  const void *array = (const char *)p->blob + *position;
  *position += ((uint64_t)count * element + 7) & ~(uint64_t)7;
  return array;
}

static bool place_arrays(checker *c, size_t bytes) {
  ocp_plan *p = c->plan;
  const ocp_plan_header *h = &p->header;
  uint64_t position = sizeof *h;
  p->inputs = take(p, &position, h->num_inputs, sizeof *p->inputs);
  p->outputs = take(p, &position, h->num_outputs, sizeof *p->outputs);
  p->weights = take(p, &position, h->num_weights, sizeof *p->weights);
  p->kernels = take(p, &position, h->num_kernels, sizeof *p->kernels);
  p->problems = take(p, &position, h->num_problems, sizeof *p->problems);
  p->dims = take(p, &position, h->num_dims, sizeof *p->dims);
  p->exprs = take(p, &position, h->num_exprs, sizeof *p->exprs);
  p->guards = take(p, &position, h->num_guards, sizeof *p->guards);
  p->asserts = take(p, &position, h->num_asserts, sizeof *p->asserts);
  p->readbacks = take(p, &position, h->num_readbacks, sizeof *p->readbacks);
  p->buffers = take(p, &position, h->num_buffers, sizeof *p->buffers);
  p->records = take(p, &position, h->num_records, sizeof *p->records);
  p->params = take(p, &position, h->num_params, sizeof *p->params);
  p->segments = take(p, &position, h->num_segments, sizeof *p->segments);
  p->nodes = take(p, &position, h->num_nodes, sizeof *p->nodes);
  p->strings = take(p, &position, h->strings_bytes, 1);
  return position == bytes ||
         reject(c, "it has %zu bytes, its counts ask for %llu", bytes, (unsigned long long)position);
}

static bool check_strings(checker *c) {
  const ocp_plan *p = c->plan;
  const uint32_t bytes = p->header.strings_bytes;
  if (bytes && p->strings[bytes - 1])
    return reject(c, "the strings are not terminated");
  for (uint32_t i = 0; i < p->header.num_nodes; i++)
    if (p->nodes[i] >= bytes)
      return reject(c, "the name of node %u is out of range", i);
  return true;
}

/* ---- registers ---- */

static bool define(checker *c, uint32_t first, uint32_t count, const char *what, uint32_t index) {
  if (first > c->plan->header.num_registers || count > c->plan->header.num_registers - first)
    return reject(c, "%s %u defines registers out of range", what, index);
  for (uint32_t r = first; r < first + count; r++) {
    if (c->defined[r])
      return reject(c, "%s %u defines register %u again", what, index, r);
    c->defined[r] = true;
  }
  return true;
}

static bool uses(checker *c, uint32_t reg, const char *what, uint32_t index) {
  if (reg >= c->plan->header.num_registers || !c->defined[reg])
    return reject(c, "%s %u uses register %u before it is defined", what, index, reg);
  return true;
}

static bool may_use(checker *c, uint32_t reg, const char *what, uint32_t index) {
  return reg == OCP_NO_REG || uses(c, reg, what, index);
}

static uint32_t num_operands(uint32_t op) {
  if (op == OCP_EXPR_CONST)
    return 0;
  return op == OCP_EXPR_SELECT ? 3 : 2;
}

/* ---- the parts ---- */

static bool check_inputs(checker *c) {
  const ocp_plan *p = c->plan;
  uint32_t next = 0;
  for (uint32_t i = 0; i < p->header.num_inputs; i++) {
    const ocp_plan_input *in = &p->inputs[i];
    if (in->rank > OCP_MAX_RANK || !ocp_dtype_bits(in->dtype))
      return reject(c, "input %u has rank %u and element type %u", i, in->rank, in->dtype);
    if (in->first_register != next)
      return reject(c, "the dimensions of input %u are not register %u and following", i, next);
    if (!define(c, next, in->rank, "input", i))
      return false;
    next += in->rank;
  }
  for (uint32_t i = 0; i < p->header.num_inputs; i++) {
    const ocp_plan_input *in = &p->inputs[i];
    if (in->host_register == OCP_NO_REG) {
      if (in->host_count)
        return reject(c, "input %u has host values but no register for them", i);
      continue;
    }
    if (!ocp_dtype_is_integer(in->dtype) || in->host_count > OCP_MAX_HOST_VALUES)
      return reject(c, "host input %u has element type %u and %u elements", i, in->dtype, in->host_count);
    if (in->host_register != next)
      return reject(c, "the host values of input %u are not register %u and following", i, next);
    if (!define(c, next, in->host_count, "host input", i))
      return false;
    next += in->host_count;
  }
  return true;
}

static bool check_outputs(checker *c) {
  const ocp_plan *p = c->plan;
  uint32_t next = 0;
  for (uint32_t i = 0; i < p->header.num_outputs; i++) {
    const ocp_plan_output *out = &p->outputs[i];
    if (out->rank > OCP_MAX_RANK || !ocp_dtype_bits(out->dtype) || out->segment >= p->header.num_segments)
      return reject(c, "output %u has rank %u, element type %u, segment %u", i, out->rank, out->dtype, out->segment);
    if (out->first_dim != next || out->rank > p->header.num_dims - next)
      return reject(c, "the dimensions of output %u are out of range", i);
    next += out->rank;
  }
  return next == p->header.num_dims || reject(c, "%u dimensions belong to no output", p->header.num_dims - next);
}

/* Memory that work of `segment` names. record is UINT32_MAX for a read-back, which happens before the segment. */
static bool check_ref(checker *c, uint32_t kind, uint32_t index, uint32_t segment, uint32_t record) {
  const ocp_plan *p = c->plan;
  const bool readback = record == UINT32_MAX;
  switch (kind) {
  case OCP_REF_INPUT:
    return index < p->header.num_inputs || reject(c, "input %u does not exist", index);
  case OCP_REF_WEIGHT:
    return index < p->header.num_weights || reject(c, "weight %u does not exist", index);
  case OCP_REF_OUTPUT:
    if (index >= p->header.num_outputs)
      return reject(c, "output %u does not exist", index);
    if (p->outputs[index].segment + readback > segment)
      return reject(c, "output %u is named before it is allocated", index);
    return true;
  case OCP_REF_BUFFER:
    if (index >= p->header.num_buffers)
      return reject(c, "buffer %u does not exist", index);
    if (p->buffers[index].segment + readback > segment)
      return reject(c, "buffer %u is named before it is allocated", index);
    if (!readback && (record < p->buffers[index].first_record || record > p->buffers[index].last_record))
      return reject(c, "record %u names buffer %u outside its life", record, index);
    return true;
  default:
    return reject(c, "reference kind %u does not exist", kind);
  }
}

static bool check_readbacks(checker *c, uint32_t segment) {
  const ocp_plan *p = c->plan;
  const ocp_range range = p->views[segment].readbacks;
  for (uint32_t i = range.first; i < range.first + range.count; i++) {
    const ocp_plan_readback *r = &p->readbacks[i];
    if (segment == 0)
      return reject(c, "read-back %u is in the first segment", i);
    if (!ocp_dtype_is_integer(r->dtype) || r->count == 0 || r->count > OCP_MAX_HOST_VALUES)
      return reject(c, "read-back %u has element type %u and %u elements", i, r->dtype, r->count);
    if (!check_ref(c, r->ref_kind, r->ref_index, segment, UINT32_MAX) ||
        !may_use(c, r->byte_offset_register, "read-back", i))
      return false;
  }
  /* Defined only after all of them were looked at: they are read at once. */
  for (uint32_t i = range.first; i < range.first + range.count; i++)
    if (!define(c, p->readbacks[i].dst, p->readbacks[i].count, "read-back", i))
      return false;
  return true;
}

static bool check_exprs(checker *c, uint32_t segment) {
  const ocp_plan *p = c->plan;
  const ocp_range range = p->views[segment].exprs;
  for (uint32_t i = range.first; i < range.first + range.count; i++) {
    const ocp_plan_expr *e = &p->exprs[i];
    const uint32_t operands[3] = {e->a, e->b, e->c};
    if (e->op >= OCP_EXPR_NUM_OPS)
      return reject(c, "expression %u has operation %u", i, e->op);
    for (uint32_t k = 0; k < num_operands(e->op); k++) {
      if (!uses(c, operands[k], "expression", i))
        return false;
      if (operands[k] >= e->dst)
        return reject(c, "expression %u has an operand that is not smaller than its register", i);
    }
    if (!define(c, e->dst, 1, "expression", i))
      return false;
  }
  return true;
}

static bool check_param(checker *c, uint32_t record, const ocp_plan_param *param) {
  switch (param->kind) {
  case OCP_PARAM_POINTER:
    return check_ref(c, param->ref_kind, param->ref_index, c->plan->records[record].segment, record) &&
           may_use(c, param->reg, "record", record);
  case OCP_PARAM_I8:
  case OCP_PARAM_I16:
  case OCP_PARAM_I32:
  case OCP_PARAM_I64:
    return may_use(c, param->reg, "record", record);
  case OCP_PARAM_F32:
  case OCP_PARAM_F64:
    return param->reg == OCP_NO_REG || reject(c, "record %u takes a floating-point number from a register", record);
  default:
    return reject(c, "record %u has a parameter of kind %u", record, param->kind);
  }
}

static bool has_params(const ocp_plan_record *r, const ocp_plan_param *params, uint32_t first, uint32_t second,
                       uint32_t third) {
  const ocp_plan_param *p = params + r->first_param;
  return r->num_params == 3 && p[0].kind == first && p[1].kind == second && p[2].kind == third;
}

static bool check_record(checker *c, uint32_t index) {
  const ocp_plan *p = c->plan;
  const ocp_plan_record *r = &p->records[index];
  if (r->node >= p->header.num_nodes)
    return reject(c, "record %u belongs to no node", index);
  if (!may_use(c, r->condition_register, "record", index) || !may_use(c, r->shared_register, "record", index))
    return false;
  switch (r->kind) {
  case OCP_RECORD_LAUNCH:
    if (r->index >= p->header.num_kernels)
      return reject(c, "record %u launches kernel %u, which does not exist", index, r->index);
    for (int d = 0; d < 3; d++) {
      if (!uses(c, r->grid[d], "record", index))
        return false;
      if (r->block[d] == 0 || r->block[d] > 1024)
        return reject(c, "record %u has a block of %u x %u x %u", index, r->block[0], r->block[1], r->block[2]);
    }
    if ((uint64_t)r->block[0] * r->block[1] * r->block[2] > 1024 || r->num_params > OCP_MAX_LAUNCH_PARAMS)
      return reject(c, "record %u has too many threads or parameters", index);
    break;
  case OCP_RECORD_COPY:
    if (!has_params(r, p->params, OCP_PARAM_POINTER, OCP_PARAM_POINTER, OCP_PARAM_I64))
      return reject(c, "record %u is a copy with other parameters than two pointers and a size", index);
    break;
  case OCP_RECORD_MEMSET:
    if (!has_params(r, p->params, OCP_PARAM_POINTER, OCP_PARAM_I32, OCP_PARAM_I64))
      return reject(c, "record %u is a memset with other parameters than a pointer, a byte and a size", index);
    break;
  case OCP_RECORD_LIBRARY:
    if (r->index >= p->header.num_problems)
      return reject(c, "record %u runs library problem %u, which does not exist", index, r->index);
    break;
  default:
    return reject(c, "record %u has kind %u", index, r->kind);
  }
  for (uint32_t i = 0; i < r->num_params; i++)
    if (!check_param(c, index, &p->params[r->first_param + i]))
      return false;
  return true;
}

static bool check_record_ranges(checker *c) {
  const ocp_plan *p = c->plan;
  uint32_t next_record = 0, next_param = 0;
  for (uint32_t s = 0; s < p->header.num_segments; s++) {
    const ocp_plan_segment *segment = &p->segments[s];
    if (segment->first_record != next_record || segment->num_records > p->header.num_records - next_record)
      return reject(c, "the records of segment %u are out of range", s);
    p->views[s].records = (ocp_range){next_record, segment->num_records};
    for (uint32_t i = next_record; i < next_record + segment->num_records; i++) {
      const ocp_plan_record *r = &p->records[i];
      if (r->segment != s)
        return reject(c, "record %u is not in segment %u", i, s);
      if (r->first_param != next_param || r->num_params > p->header.num_params - next_param)
        return reject(c, "the parameters of record %u are out of range", i);
      next_param += r->num_params;
    }
    next_record += segment->num_records;
  }
  if (next_record != p->header.num_records || next_param != p->header.num_params)
    return reject(c, "records or parameters belong to nothing");
  return true;
}

static bool check_buffers(checker *c) {
  const ocp_plan *p = c->plan;
  for (uint32_t i = 0; i < p->header.num_buffers; i++) {
    const ocp_plan_buffer *b = &p->buffers[i];
    if (b->segment >= p->header.num_segments || b->first_record > b->last_record ||
        b->last_record >= p->header.num_records || p->records[b->first_record].segment != b->segment)
      return reject(c, "buffer %u lives from record %u to %u of segment %u", i, b->first_record, b->last_record,
                    b->segment);
  }
  return true;
}

/* All that happens in one segment, after those before it. */
static bool check_segment(checker *c, uint32_t segment) {
  const ocp_plan *p = c->plan;
  const ocp_segment_view *v = &p->views[segment];
  if (!check_readbacks(c, segment) || !check_exprs(c, segment))
    return false;
  if (segment == 0)
    for (uint32_t i = 0; i < p->header.num_guards; i++)
      if (!uses(c, p->guards[i], "guard", i))
        return false;
  for (uint32_t i = v->asserts.first; i < v->asserts.first + v->asserts.count; i++) {
    const ocp_plan_assert *a = &p->asserts[i];
    if (a->node >= p->header.num_nodes || a->message >= p->header.strings_bytes)
      return reject(c, "assertion %u has no node or message", i);
    if (!uses(c, a->reg, "assertion", i))
      return false;
  }
  for (uint32_t i = v->outputs.first; i < v->outputs.first + v->outputs.count; i++) {
    const ocp_plan_output *out = &p->outputs[p->output_order[i]];
    for (uint32_t d = 0; d < out->rank; d++)
      if (!uses(c, p->dims[out->first_dim + d], "output", p->output_order[i]))
        return false;
  }
  for (uint32_t i = v->buffers.first; i < v->buffers.first + v->buffers.count; i++)
    if (!uses(c, p->buffers[p->buffer_order[i]].size_register, "buffer", p->buffer_order[i]))
      return false;
  for (uint32_t i = v->records.first; i < v->records.first + v->records.count; i++)
    if (!check_record(c, i))
      return false;
  return true;
}

/* ---- what is derived ---- */

/* The field `segment` of the elements of an array, and the ocp_range of a segment view that tells which are its. */
typedef struct segmented {
  const uint32_t *segment_of_first;
  size_t element;
  uint32_t count;
  size_t range_offset;
} segmented;

static uint32_t segment_of(const segmented *array, uint32_t index) {
  return *(const uint32_t *)((const char *)array->segment_of_first + index * array->element);
}

static ocp_range *range_of(const ocp_plan *p, const segmented *array, uint32_t segment) {
  return (ocp_range *)((char *)&p->views[segment] + array->range_offset);
}

/* Finds the ranges of an array that is ordered by segment. */
static bool split(checker *c, segmented array, const char *what) {
  uint32_t last = 0;
  for (uint32_t i = 0; i < array.count; i++) {
    const uint32_t segment = segment_of(&array, i);
    if (segment < last || segment >= c->plan->header.num_segments)
      return reject(c, "%s %u is out of order or in no segment", what, i);
    ocp_range *range = range_of(c->plan, &array, segment);
    if (!range->count)
      range->first = i;
    range->count++;
    last = segment;
  }
  return true;
}

/* Fills order with the indices grouped by segment, and finds the ranges of it. The segments were checked. */
static void group(const ocp_plan *p, segmented array, uint32_t *order) {
  for (uint32_t i = 0; i < array.count; i++)
    range_of(p, &array, segment_of(&array, i))->count++;
  uint32_t first = 0;
  for (uint32_t s = 0; s < p->header.num_segments; s++) {
    ocp_range *range = range_of(p, &array, s);
    range->first = first;
    first += range->count;
    range->count = 0;
  }
  for (uint32_t i = 0; i < array.count; i++) {
    ocp_range *range = range_of(p, &array, segment_of(&array, i));
    order[range->first + range->count++] = i;
  }
}

static void find_buffer_ends(ocp_plan *p) {
  for (uint32_t i = 0; i < p->header.num_buffers; i++) {
    const ocp_plan_buffer *b = &p->buffers[i];
    const bool outlives = p->records[b->last_record].segment > b->segment;
    p->buffer_last[i] = outlives ? UINT32_MAX : b->last_record;
  }
  for (uint32_t i = 0; i < p->header.num_readbacks; i++)
    if (p->readbacks[i].ref_kind == OCP_REF_BUFFER)
      p->buffer_last[p->readbacks[i].ref_index] = UINT32_MAX;
  for (uint32_t i = 0; i < p->header.num_buffers; i++)
    if (p->buffer_last[i] == UINT32_MAX)
      p->views[p->buffers[i].segment].keeps_slab = true;
}

/* Walks back from the guards; `needed` has one entry per register. */
static void find_guard_exprs(ocp_plan *p, bool *needed) {
  memset(needed, 0, p->header.num_registers * sizeof *needed);
  for (uint32_t i = 0; i < p->header.num_guards; i++)
    needed[p->guards[i]] = true;
  const ocp_range range = p->views[0].exprs;
  uint32_t count = 0;
  for (uint32_t i = range.first + range.count; i-- > range.first;) {
    const ocp_plan_expr *e = &p->exprs[i];
    if (!needed[e->dst])
      continue;
    const uint32_t operands[3] = {e->a, e->b, e->c};
    for (uint32_t k = 0; k < num_operands(e->op); k++)
      needed[operands[k]] = true;
    p->guard_exprs[count++] = i;
  }
  for (uint32_t i = 0; i < count / 2; i++) {
    const uint32_t swap = p->guard_exprs[i];
    p->guard_exprs[i] = p->guard_exprs[count - 1 - i];
    p->guard_exprs[count - 1 - i] = swap;
  }
  p->num_guard_exprs = count;
}

static void find_needs(ocp_plan *p) {
  p->capturable = p->header.num_readbacks == 0;
  for (uint32_t i = 0; i < p->header.num_inputs; i++)
    if (p->inputs[i].host_register != OCP_NO_REG)
      p->capturable = false;
  uint32_t num_pointers = 0;
  for (uint32_t s = 0; s < p->header.num_segments; s++) {
    ocp_segment_view *view = &p->views[s];
    view->pointers.first = num_pointers;
    for (uint32_t i = view->records.first; i < view->records.first + view->records.count; i++)
      for (uint32_t k = 0; k < p->records[i].num_params; k++) {
        const ocp_plan_param *param = &p->params[p->records[i].first_param + k];
        if (param->kind != OCP_PARAM_POINTER || param->ref_kind == OCP_REF_WEIGHT)
          continue;
        num_pointers++;
        if (param->ref_kind == OCP_REF_INPUT)
          p->input_needs_device[param->ref_index] = true;
      }
    view->pointers.count = num_pointers - view->pointers.first;
  }
  for (uint32_t i = 0; i < p->header.num_readbacks; i++)
    if (p->readbacks[i].ref_kind == OCP_REF_INPUT)
      p->input_needs_device[p->readbacks[i].ref_index] = true;
}

static bool load(checker *c, size_t bytes) {
  ocp_plan *p = c->plan;
  const ocp_plan_header *h = &p->header;
  if (h->magic != OCP_PLAN_MAGIC || h->version != OCP_PLAN_VERSION)
    return reject(c, "magic %#x, version %u; this build reads version %u", h->magic, h->version, OCP_PLAN_VERSION);
  if (h->num_registers > OCP_MAX_REGISTERS || h->num_segments == 0)
    return reject(c, "%u registers, %u segments", h->num_registers, h->num_segments);
  if (!place_arrays(c, bytes))
    return false;
  /* From here on counts are bounded by the size of the blob. calloc(0) may give NULL: ask for one more. */
  p->views = calloc(h->num_segments, sizeof *p->views);
  p->output_order = calloc(h->num_outputs + 1, sizeof *p->output_order);
  p->buffer_order = calloc(h->num_buffers + 1, sizeof *p->buffer_order);
  p->buffer_last = calloc(h->num_buffers + 1, sizeof *p->buffer_last);
  p->guard_exprs = calloc(h->num_exprs + 1, sizeof *p->guard_exprs);
  p->input_needs_device = calloc(h->num_inputs + 1, sizeof *p->input_needs_device);
  c->defined = calloc(h->num_registers + 1, sizeof *c->defined);
  if (!p->views || !p->output_order || !p->buffer_order || !p->buffer_last || !p->guard_exprs ||
      !p->input_needs_device || !c->defined)
    return reject(c, "not enough host memory to load it");
  if (!check_strings(c) || !check_inputs(c) || !check_outputs(c) || !check_record_ranges(c) || !check_buffers(c))
    return false;
  const segmented exprs = {&p->exprs->segment, sizeof *p->exprs, h->num_exprs, offsetof(ocp_segment_view, exprs)};
  const segmented asserts = {&p->asserts->segment, sizeof *p->asserts, h->num_asserts,
                             offsetof(ocp_segment_view, asserts)};
  const segmented readbacks = {&p->readbacks->segment, sizeof *p->readbacks, h->num_readbacks,
                               offsetof(ocp_segment_view, readbacks)};
  if (!split(c, exprs, "expression") || !split(c, asserts, "assertion") || !split(c, readbacks, "read-back"))
    return false;
  group(p, (segmented){&p->outputs->segment, sizeof *p->outputs, h->num_outputs, offsetof(ocp_segment_view, outputs)},
        p->output_order);
  group(p, (segmented){&p->buffers->segment, sizeof *p->buffers, h->num_buffers, offsetof(ocp_segment_view, buffers)},
        p->buffer_order);
  for (uint32_t s = 0; s < h->num_segments; s++)
    if (!check_segment(c, s))
      return false;
  find_buffer_ends(p);
  find_guard_exprs(p, c->defined);
  find_needs(p);
  return true;
}

ocp_plan *ocp_plan_load(const void *blob, size_t bytes, ocp_error *error) {
  checker c = {.plan = calloc(1, sizeof(ocp_plan)), .error = error};
  /* An own copy: aligned, and nobody can change it after it was checked. */
  if (c.plan)
    c.plan->blob = malloc(bytes ? bytes : 1);
  bool ok = false;
  if (!c.plan || !c.plan->blob) {
    reject(&c, "not enough host memory to load it");
  } else if (bytes < sizeof c.plan->header) {
    reject(&c, "it is truncated");
  } else {
    memcpy(c.plan->blob, blob, bytes);
    memcpy(&c.plan->header, blob, sizeof c.plan->header);
    ok = load(&c, bytes);
  }
  free(c.defined);
  if (ok)
    return c.plan;
  ocp_plan_free(c.plan);
  return NULL;
}

void ocp_plan_free(ocp_plan *plan) {
  if (!plan)
    return;
  free(plan->blob);
  free(plan->views);
  free(plan->output_order);
  free(plan->buffer_order);
  free(plan->buffer_last);
  free(plan->guard_exprs);
  free(plan->input_needs_device);
  free(plan);
}
