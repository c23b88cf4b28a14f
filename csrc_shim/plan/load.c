/* Loads a plan: makes a checked ocp_plan from a blob.
 *
 * A blob may come from a file and is untrusted until check.c has checked it; code that runs plans relies on that check.
 *
 * Invariants of an ocp_plan, for as long as it lives:
 * - It never changes, so that threads share it without a lock, and it owns its copy of the blob.
 * - Every index and range in it is inside of its array, and every string is terminated.
 * - A register is defined at most once, and before its first use: by an input, or by an expression or a read-back of
 *   the same segment or an earlier one.
 * - Guards depend on dimensions of inputs and on host values alone.
 * - The records, outputs, buffers and expressions of a segment are contiguous ranges (ocp_segment_view).
 * - For each pair of in_place, one record is the last that reads the input and the first that names the output.
 * - A later record of the same segment awaits each upload.
 *
 * When a plan is added to a cluster, the cluster checks that the plan's kernels, weights and problems exist. */
#include "plan/load.h"

#include <stdlib.h>
#include <string.h>

#include "plan/check.h"

const char *ocp_plan_node_name(const ocp_plan *plan, uint32_t node) { return plan->strings + plan->nodes[node].label; }

const char *ocp_plan_node_op_type(const ocp_plan *plan, uint32_t node) {
  return plan->strings + plan->nodes[node].op_type;
}

const char *ocp_plan_node_own_name(const ocp_plan *plan, uint32_t node, size_t *bytes) {
  const char *label = ocp_plan_node_name(plan, node);
  const size_t all = strlen(label), type = strlen(ocp_plan_node_op_type(plan, node));
  *bytes = type && all > type + 3 ? all - type - 3 : all;
  return label;
}

ocp_sharing ocp_plan_sharing(const ocp_plan *plan, uint32_t input, uint32_t output) {
  if (plan->input_end[input] <= plan->output_begin[output])
    return OCP_SHARING_IN_ORDER;
  uint32_t first = 0, last = plan->header.num_in_place; /* the pair, if there is one, is in first .. last - 1 */
  while (first < last) {
    const uint32_t middle = first + (last - first) / 2;
    const ocp_plan_in_place *pair = &plan->in_place[middle];
    if (pair->output == output && pair->input == input)
      return pair->kind == OCP_IN_PLACE_KEPT ? OCP_SHARING_KEPT : OCP_SHARING_ELEMENTS;
    if (pair->output < output || (pair->output == output && pair->input < input))
      first = middle + 1;
    else
      last = middle;
  }
  return OCP_SHARING_NONE;
}

/* ---- the blob's arrays ---- */

/* Returns the next array of the blob. *position exceeds the blob's size if the counts are too large. It cannot wrap
 * around, since counts have 32 bits and elements are small. */
static const void *take(const ocp_plan *p, uint64_t *position, uint32_t count, size_t element) {
  const void *array = (const char *)p->blob + *position;
  *position += ((uint64_t)count * element + 7) & ~(uint64_t)7;
  return array;
}

static bool place_arrays(ocp_plan *p, size_t bytes, ocp_error *error) {
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
  p->record_nodes = take(p, &position, h->num_record_nodes, sizeof *p->record_nodes);
  p->in_place = take(p, &position, h->num_in_place, sizeof *p->in_place);
  p->strings = take(p, &position, h->strings_bytes, 1);
  return position == bytes ||
         ocp_plan_reject(error, "the plan has %zu bytes, but the counts in its header need %llu bytes", bytes,
                         (unsigned long long)position);
}

/* ---- segments ---- */

/* Describes an array of the plan whose elements (`element` bytes) have a field `segment`. range_offset: bytes from the
 * start of an ocp_segment_view to the range of the segment's elements. */
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

/* Finds each segment's range of an array that is ordered by segment. */
static bool split(const ocp_plan *p, segmented array, const char *what, ocp_error *error) {
  uint32_t last = 0;
  for (uint32_t i = 0; i < array.count; i++) {
    const uint32_t segment = segment_of(&array, i);
    if (segment < last || segment >= p->header.num_segments)
      return ocp_plan_reject(error, "%s %u is in segment %u, expected a segment from %u to %u", what, i, segment, last,
                             p->header.num_segments - 1);
    ocp_range *range = range_of(p, &array, segment);
    if (!range->count)
      range->first = i;
    range->count++;
    last = segment;
  }
  return true;
}

/* Fills `order` with the array's indices grouped by segment, and finds each segment's range of `order`. */
static bool group(const ocp_plan *p, segmented array, uint32_t *order, const char *what, ocp_error *error) {
  for (uint32_t i = 0; i < array.count; i++) {
    if (segment_of(&array, i) >= p->header.num_segments)
      return ocp_plan_reject(error, "%s %u is in segment %u, but the plan has %u segments", what, i,
                             segment_of(&array, i), p->header.num_segments);
    range_of(p, &array, segment_of(&array, i))->count++;
  }
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
  return true;
}

/* Finds the records of each segment, and checks that every record and parameter belongs to one segment. */
static bool split_records(ocp_plan *p, ocp_error *error) {
  uint32_t next_record = 0, next_param = 0, next_node = 0;
  for (uint32_t s = 0; s < p->header.num_segments; s++) {
    const ocp_plan_segment *segment = &p->segments[s];
    if (segment->first_record != next_record || segment->num_records > p->header.num_records - next_record)
      return ocp_plan_reject(error,
                             "segment %u has %u records from record %u on, expected record %u; the plan has %u records",
                             s, segment->num_records, segment->first_record, next_record, p->header.num_records);
    p->views[s].records = (ocp_range){next_record, segment->num_records};
    for (uint32_t i = next_record; i < next_record + segment->num_records; i++) {
      const ocp_plan_record *r = &p->records[i];
      if (r->segment != s)
        return ocp_plan_reject(error, "record %u names segment %u, but belongs to segment %u", i, r->segment, s);
      if (r->first_param != next_param || r->num_params > p->header.num_params - next_param)
        return ocp_plan_reject(
            error, "record %u has %u parameters from parameter %u on, expected parameter %u; the plan has %u", i,
            r->num_params, r->first_param, next_param, p->header.num_params);
      next_param += r->num_params;
      if (r->first_node != next_node || r->num_nodes > p->header.num_record_nodes - next_node)
        return ocp_plan_reject(error,
                               "record %u has %u nodes from entry %u on, expected entry %u; the plan has %u entries", i,
                               r->num_nodes, r->first_node, next_node, p->header.num_record_nodes);
      next_node += r->num_nodes;
    }
    next_record += segment->num_records;
  }
  if (next_record != p->header.num_records || next_param != p->header.num_params ||
      next_node != p->header.num_record_nodes)
    return ocp_plan_reject(
        error, "the segments have %u records with %u parameters and %u nodes, expected %u, %u and %u", next_record,
        next_param, next_node, p->header.num_records, p->header.num_params, p->header.num_record_nodes);
  return true;
}

/* Finds each segment's records, expressions, assertions, read-backs, outputs and buffers. */
static bool split_all(ocp_plan *p, ocp_error *error) {
  const ocp_plan_header *h = &p->header;
  const segmented exprs = {&p->exprs->segment, sizeof *p->exprs, h->num_exprs, offsetof(ocp_segment_view, exprs)};
  const segmented asserts = {&p->asserts->segment, sizeof *p->asserts, h->num_asserts,
                             offsetof(ocp_segment_view, asserts)};
  const segmented readbacks = {&p->readbacks->segment, sizeof *p->readbacks, h->num_readbacks,
                               offsetof(ocp_segment_view, readbacks)};
  const segmented outputs = {&p->outputs->segment, sizeof *p->outputs, h->num_outputs,
                             offsetof(ocp_segment_view, outputs)};
  const segmented buffers = {&p->buffers->segment, sizeof *p->buffers, h->num_buffers,
                             offsetof(ocp_segment_view, buffers)};
  return split_records(p, error) && split(p, exprs, "expression", error) && split(p, asserts, "assertion", error) &&
         split(p, readbacks, "read-back", error) && group(p, outputs, p->output_order, "output", error) &&
         group(p, buffers, p->buffer_order, "buffer", error);
}

/* ---- data derived from a checked plan ---- */

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

/* Finds the expressions that guards depend on, backwards from the guards. `needed` has one entry per register, all
 * false. */
static void find_guard_exprs(ocp_plan *p, bool *needed) {
  for (uint32_t i = 0; i < p->header.num_guards; i++)
    needed[p->guards[i]] = true;
  const ocp_range range = p->views[0].exprs;
  uint32_t count = 0;
  for (uint32_t i = range.first + range.count; i-- > range.first;) {
    const ocp_plan_expr *e = &p->exprs[i];
    if (!needed[e->dst])
      continue;
    const uint32_t operands[3] = {e->a, e->b, e->c};
    for (uint32_t k = 0; k < ocp_plan_num_operands(e->op); k++)
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
  uint32_t num_pointers = 0, in_flight = 0;
  for (uint32_t i = 0; i < p->header.num_records; i++) {
    p->has_calls |= p->records[i].kind == OCP_RECORD_CALL;
    p->has_loops |= p->records[i].kind == OCP_RECORD_LOOP;
    p->has_open_loops |= p->records[i].kind == OCP_RECORD_LOOP && p->records[i].num_params == 1;
    in_flight += p->records[i].kind == OCP_RECORD_UPLOAD;
    in_flight -= p->records[i].kind == OCP_RECORD_AWAIT;
    p->uploads_in_flight = in_flight > p->uploads_in_flight ? in_flight : p->uploads_in_flight;
  }
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

/* Finds the last record that reads each input and the first that names each output. The records of a loop count as one,
 * because a later iteration reads the input again after an earlier iteration has written the output. */
static void find_order(ocp_plan *p) {
  uint32_t loop = 0, loop_end = 0; /* the outermost loop that contains record i, if i < loop_end */
  for (uint32_t i = 0; i < p->header.num_outputs; i++)
    p->output_begin[i] = UINT32_MAX;
  for (uint32_t i = 0; i < p->header.num_records; i++) {
    if (i >= loop_end && p->records[i].kind == OCP_RECORD_LOOP) {
      loop = i;
      loop_end = i + 1 + p->records[i].index;
    }
    const uint32_t first = i < loop_end ? loop : i, end = i < loop_end ? loop_end : i + 1;
    for (uint32_t k = 0; k < p->records[i].num_params; k++) {
      const ocp_plan_param *param = &p->params[p->records[i].first_param + k];
      if (param->kind != OCP_PARAM_POINTER)
        continue;
      if (param->ref_kind == OCP_REF_INPUT)
        p->input_end[param->ref_index] = end;
      else if (param->ref_kind == OCP_REF_OUTPUT && p->output_begin[param->ref_index] == UINT32_MAX)
        p->output_begin[param->ref_index] = first;
    }
  }
  for (uint32_t i = 0; i < p->header.num_readbacks; i++) {
    const ocp_plan_readback *r = &p->readbacks[i];
    const uint32_t end = p->views[r->segment].records.first;
    if (r->ref_kind == OCP_REF_INPUT && p->input_end[r->ref_index] < end)
      p->input_end[r->ref_index] = end;
  }
}

/* Checks that the pairs are in order, and that for each pair one record is the last that reads the input and the first
 * that names the output. */
static bool check_in_place(const ocp_plan *p, ocp_error *error) {
  for (uint32_t i = 0; i < p->header.num_in_place; i++) {
    const ocp_plan_in_place *pair = &p->in_place[i], *before = i ? pair - 1 : NULL;
    if (pair->input >= p->header.num_inputs || pair->output >= p->header.num_outputs ||
        pair->kind >= OCP_IN_PLACE_NUM_KINDS)
      return ocp_plan_reject(error,
                             "in-place pair %u: got input %u, output %u and kind %u, expected numbers below %u, %u and "
                             "%u",
                             i, pair->input, pair->output, pair->kind, p->header.num_inputs, p->header.num_outputs,
                             (unsigned)OCP_IN_PLACE_NUM_KINDS);
    if (before && (before->output > pair->output || (before->output == pair->output && before->input >= pair->input)))
      return ocp_plan_reject(
          error,
          "in-place pair %u, of output %u and input %u, is not in ascending order after output %u and "
          "input %u",
          i, pair->output, pair->input, before->output, before->input);
    if (p->output_begin[pair->output] == UINT32_MAX || p->input_end[pair->input] != p->output_begin[pair->output] + 1)
      return ocp_plan_reject(
          error, "in-place pair %u: the last record that reads input %u is not the first that names output %u", i,
          pair->input, pair->output);
  }
  return true;
}

static bool load(ocp_plan *p, size_t bytes, ocp_error *error) {
  const ocp_plan_header *h = &p->header;
  if (h->magic != OCP_PLAN_MAGIC || h->version != OCP_PLAN_VERSION)
    return ocp_plan_reject(error, "got magic %#x and version %u, expected %#x and %u", h->magic, h->version,
                           OCP_PLAN_MAGIC, OCP_PLAN_VERSION);
  if (h->num_registers > OCP_MAX_REGISTERS || h->num_segments == 0)
    return ocp_plan_reject(error,
                           "got %u registers and %u segments, expected at most %u registers and at least 1 segment",
                           h->num_registers, h->num_segments, OCP_MAX_REGISTERS);
  if (!place_arrays(p, bytes, error))
    return false;
  /* From here on the blob's size bounds all counts. calloc(0) may return NULL: allocate one more. */
  p->views = calloc(h->num_segments, sizeof *p->views);
  p->output_order = calloc(h->num_outputs + 1, sizeof *p->output_order);
  p->buffer_order = calloc(h->num_buffers + 1, sizeof *p->buffer_order);
  p->buffer_last = calloc(h->num_buffers + 1, sizeof *p->buffer_last);
  p->guard_exprs = calloc(h->num_exprs + 1, sizeof *p->guard_exprs);
  p->input_needs_device = calloc(h->num_inputs + 1, sizeof *p->input_needs_device);
  p->input_end = calloc(h->num_inputs + 1, sizeof *p->input_end);
  p->output_begin = calloc(h->num_outputs + 1, sizeof *p->output_begin);
  bool *needed = calloc(h->num_registers + 1, sizeof *needed);
  bool ok = p->views && p->output_order && p->buffer_order && p->buffer_last && p->guard_exprs &&
            p->input_needs_device && p->input_end && p->output_begin && needed;
  if (!ok)
    ocp_fail_memory(error);
  ok = ok && split_all(p, error) && ocp_plan_check(p, error);
  if (ok) {
    find_buffer_ends(p);
    find_guard_exprs(p, needed);
    find_needs(p);
    find_order(p);
    ok = check_in_place(p, error);
  }
  free(needed);
  return ok;
}

ocp_plan *ocp_plan_load(const void *blob, size_t bytes, ocp_error *error) {
  ocp_plan *plan = calloc(1, sizeof *plan);
  /* Copies the blob: the copy is aligned, and the caller cannot change it after the check. */
  if (plan)
    plan->blob = malloc(bytes ? bytes : 1);
  bool ok = false;
  if (!plan || !plan->blob) {
    ocp_fail_memory(error);
  } else if (bytes < sizeof plan->header) {
    ocp_plan_reject(error, "the plan has %zu bytes, expected at least %zu, the size of its header", bytes,
                    sizeof plan->header);
  } else {
    memcpy(plan->blob, blob, bytes);
    memcpy(&plan->header, blob, sizeof plan->header);
    ok = load(plan, bytes, error);
  }
  if (ok)
    return plan;
  ocp_plan_free(plan);
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
  free(plan->input_end);
  free(plan->output_begin);
  free(plan);
}
