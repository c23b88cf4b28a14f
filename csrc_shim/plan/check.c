/* Checks that a plan is consistent before anything relies on it: every count, index, range and register. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/dtype.h"
#include "base/error.h"
#include "plan/check.h"
#include "plan/format.h"

typedef struct checker {
  const ocp_plan *plan;
  bool *defined; /* per register: defined in the segments checked so far */
  ocp_error *error;
} checker;

bool ocp_plan_reject(ocp_error *error, const char *format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  ocp_fail(error, ORT_INVALID_GRAPH,
           "invalid plan: %s. If the model is a compiled model, compile it again; else report the model", text);
  return false;
}

/* ---- registers ---- */

static bool define(checker *c, uint32_t first, uint32_t count, const char *what, uint32_t index) {
  if (first > c->plan->header.num_registers || count > c->plan->header.num_registers - first)
    return ocp_plan_reject(c->error, "%s %u defines %u registers from register %u on, but the plan has %u registers",
                           what, index, count, first, c->plan->header.num_registers);
  for (uint32_t r = first; r < first + count; r++) {
    if (c->defined[r])
      return ocp_plan_reject(c->error, "%s %u defines register %u, which is defined already", what, index, r);
    c->defined[r] = true;
  }
  return true;
}

static bool uses(checker *c, uint32_t reg, const char *what, uint32_t index) {
  if (reg >= c->plan->header.num_registers || !c->defined[reg])
    return ocp_plan_reject(c->error, "%s %u reads register %u, which is not defined yet; the plan has %u registers",
                           what, index, reg, c->plan->header.num_registers);
  return true;
}

static bool may_use(checker *c, uint32_t reg, const char *what, uint32_t index) {
  return reg == OCP_NO_REG || uses(c, reg, what, index);
}

uint32_t ocp_plan_num_operands(uint32_t op) {
  if (op == OCP_EXPR_CONST)
    return 0;
  return op == OCP_EXPR_SELECT ? 3 : 2;
}

static bool is_node(const ocp_plan *plan, uint32_t node) {
  return node == OCP_NO_NODE || node < plan->header.num_nodes;
}

/* ---- arrays ---- */

static bool check_strings(checker *c) {
  const ocp_plan *p = c->plan;
  const uint32_t bytes = p->header.strings_bytes;
  if (bytes && p->strings[bytes - 1])
    return ocp_plan_reject(c->error, "the last of %u bytes of strings is %d, expected a zero byte", bytes,
                           p->strings[bytes - 1]);
  for (uint32_t i = 0; i < p->header.num_nodes; i++)
    if (p->nodes[i].label >= bytes || p->nodes[i].op_type >= bytes)
      return ocp_plan_reject(
          c->error, "node %u: its name is at byte %u and its operator at byte %u of the strings, expected less than %u",
          i, p->nodes[i].label, p->nodes[i].op_type, bytes);
  for (uint32_t i = 0; i < p->header.num_record_nodes; i++)
    if (p->record_nodes[i] >= p->header.num_nodes)
      return ocp_plan_reject(c->error, "entry %u of the nodes of records: got node %u, expected a number below %u", i,
                             p->record_nodes[i], p->header.num_nodes);
  return true;
}

static bool check_inputs(checker *c) {
  const ocp_plan *p = c->plan;
  uint32_t next = 0;
  for (uint32_t i = 0; i < p->header.num_inputs; i++) {
    const ocp_plan_input *in = &p->inputs[i];
    if (in->rank > OCP_MAX_RANK || !ocp_dtype_bits(in->dtype))
      return ocp_plan_reject(
          c->error,
          "input %u: got rank %u and element type %u, expected a rank of at most %d and a numeric or bool type", i,
          in->rank, in->dtype, OCP_MAX_RANK);
    if (in->first_register != next)
      return ocp_plan_reject(c->error, "input %u: its first dimension is register %u, expected register %u", i,
                             in->first_register, next);
    if (!define(c, next, in->rank, "input", i))
      return false;
    next += in->rank;
  }
  for (uint32_t i = 0; i < p->header.num_inputs; i++) {
    const ocp_plan_input *in = &p->inputs[i];
    if (in->host_register == OCP_NO_REG) {
      if (in->host_count)
        return ocp_plan_reject(c->error, "input %u has %u host values, but no register for the values", i,
                               in->host_count);
      continue;
    }
    if (!ocp_dtype_is_integer(in->dtype) || in->host_count > OCP_MAX_HOST_VALUES)
      return ocp_plan_reject(c->error,
                             "input %u, which the host reads: got element type %u and %u elements, expected an integer "
                             "type and at most %u elements",
                             i, in->dtype, in->host_count, OCP_MAX_HOST_VALUES);
    if (in->host_register != next)
      return ocp_plan_reject(c->error, "input %u: its first host value is register %u, expected register %u", i,
                             in->host_register, next);
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
    if (out->rank > OCP_MAX_RANK || !ocp_dtype_bits(out->dtype))
      return ocp_plan_reject(
          c->error,
          "output %u: got rank %u and element type %u, expected a rank of at most %d and a numeric or bool type", i,
          out->rank, out->dtype, OCP_MAX_RANK);
    if (!is_node(p, out->node))
      return ocp_plan_reject(c->error, "output %u names node %u, but the plan has %u nodes", i, out->node,
                             p->header.num_nodes);
    if (out->first_dim != next || out->rank > p->header.num_dims - next)
      return ocp_plan_reject(
          c->error, "output %u has %u dimensions from index %u on, expected index %u; the plan has %u dimensions", i,
          out->rank, out->first_dim, next, p->header.num_dims);
    next += out->rank;
  }
  return next == p->header.num_dims || ocp_plan_reject(c->error, "%u of %u dimensions belong to no output",
                                                       p->header.num_dims - next, p->header.num_dims);
}

/* Checks the reference to memory in a record of `segment`, or, if `record` is UINT32_MAX, in a read-back, which happens
 * before the segment. */
static bool check_ref(checker *c, uint32_t kind, uint32_t index, uint32_t segment, uint32_t record) {
  const ocp_plan *p = c->plan;
  const bool readback = record == UINT32_MAX;
  switch (kind) {
  case OCP_REF_INPUT:
    return index < p->header.num_inputs ||
           ocp_plan_reject(c->error, "segment %u uses input %u, but the plan has %u inputs", segment, index,
                           p->header.num_inputs);
  case OCP_REF_WEIGHT:
    return index < p->header.num_weights ||
           ocp_plan_reject(c->error, "segment %u uses weight %u, but the plan has %u weights", segment, index,
                           p->header.num_weights);
  case OCP_REF_OUTPUT:
    if (index >= p->header.num_outputs)
      return ocp_plan_reject(c->error, "segment %u uses output %u, but the plan has %u outputs", segment, index,
                             p->header.num_outputs);
    if (p->outputs[index].segment + readback > segment)
      return ocp_plan_reject(c->error, "%s of segment %u uses output %u, which segment %u allocates later",
                             readback ? "a read-back" : "a record", segment, index, p->outputs[index].segment);
    return true;
  case OCP_REF_BUFFER:
    if (index >= p->header.num_buffers)
      return ocp_plan_reject(c->error, "segment %u uses buffer %u, but the plan has %u buffers", segment, index,
                             p->header.num_buffers);
    if (p->buffers[index].segment + readback > segment)
      return ocp_plan_reject(c->error, "%s of segment %u uses buffer %u, which segment %u allocates later",
                             readback ? "a read-back" : "a record", segment, index, p->buffers[index].segment);
    if (!readback && (record < p->buffers[index].first_record || record > p->buffers[index].last_record))
      return ocp_plan_reject(c->error, "record %u uses buffer %u, which is allocated for records %u to %u only", record,
                             index, p->buffers[index].first_record, p->buffers[index].last_record);
    return true;
  default:
    return ocp_plan_reject(c->error, "segment %u: unknown reference kind %u", segment, kind);
  }
}

static bool check_readbacks(checker *c, uint32_t segment) {
  const ocp_plan *p = c->plan;
  const ocp_range range = p->views[segment].readbacks;
  for (uint32_t i = range.first; i < range.first + range.count; i++) {
    const ocp_plan_readback *r = &p->readbacks[i];
    if (segment == 0)
      return ocp_plan_reject(c->error, "read-back %u is in segment 0, expected a later segment", i);
    if (!ocp_dtype_is_integer(r->dtype) || r->count == 0 || r->count > OCP_MAX_HOST_VALUES)
      return ocp_plan_reject(
          c->error, "read-back %u: got element type %u and %u elements, expected an integer type and 1 to %u elements",
          i, r->dtype, r->count, OCP_MAX_HOST_VALUES);
    if (!check_ref(c, r->ref_kind, r->ref_index, segment, UINT32_MAX) ||
        !may_use(c, r->byte_offset_register, "read-back", i))
      return false;
  }
  /* The registers become defined only after all read-backs were checked, since the read-backs happen together. */
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
      return ocp_plan_reject(c->error, "expression %u: got operation %u, expected less than %u", i, e->op,
                             (unsigned)OCP_EXPR_NUM_OPS);
    if (!is_node(p, e->node))
      return ocp_plan_reject(c->error, "expression %u names node %u, but the plan has %u nodes", i, e->node,
                             p->header.num_nodes);
    for (uint32_t k = 0; k < ocp_plan_num_operands(e->op); k++) {
      if (!uses(c, operands[k], "expression", i))
        return false;
      if (operands[k] >= e->dst)
        return ocp_plan_reject(c->error,
                               "expression %u reads register %u, expected a register below its result, register %u", i,
                               operands[k], e->dst);
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
  case OCP_PARAM_CONDITION:
    return (param->reg == OCP_NO_REG && param->imm >= 0 && param->imm < c->plan->header.num_records &&
            c->plan->records[param->imm].kind == OCP_RECORD_LOOP &&
            c->plan->records[record].kind == OCP_RECORD_LAUNCH) ||
           ocp_plan_reject(c->error,
                           "record %u: got a record of kind %u with the condition of record %lld as a parameter, "
                           "expected a launch with the condition of a loop, as a constant",
                           record, c->plan->records[record].kind, (long long)param->imm);
  case OCP_PARAM_F32:
  case OCP_PARAM_F64:
    return param->reg == OCP_NO_REG ||
           ocp_plan_reject(c->error, "record %u: a floating-point parameter names register %u, expected a constant",
                           record, param->reg);
  default:
    return ocp_plan_reject(c->error, "record %u: unknown parameter kind %u", record, param->kind);
  }
}

static bool has_params(const ocp_plan_record *r, const ocp_plan_param *params, uint32_t first, uint32_t second,
                       uint32_t third) {
  const ocp_plan_param *p = params + r->first_param;
  return r->num_params == 3 && p[0].kind == first && p[1].kind == second && p[2].kind == third;
}

/* Checks that the records that a loop repeats are in the loop's segment, that loops nest, and that no loop repeats an
 * upload or the wait for one. */
static bool check_loops(checker *c, const ocp_segment_view *view) {
  uint32_t ends[OCP_MAX_LOOP_DEPTH + 1], depth = 0;
  ends[0] = view->records.first + view->records.count;
  for (uint32_t i = view->records.first; i < ends[0]; i++) {
    const ocp_plan_record *r = &c->plan->records[i];
    while (depth && i == ends[depth])
      depth--;
    if (depth && (r->kind == OCP_RECORD_UPLOAD || r->kind == OCP_RECORD_AWAIT))
      return ocp_plan_reject(c->error, "record %u: got %s in a loop, expected it outside of loops", i,
                             r->kind == OCP_RECORD_UPLOAD ? "an upload" : "the wait for an upload");
    if (r->kind != OCP_RECORD_LOOP)
      continue;
    if (depth == OCP_MAX_LOOP_DEPTH)
      return ocp_plan_reject(c->error, "record %u: the loop is nested more than %u deep", i, OCP_MAX_LOOP_DEPTH);
    if (r->index > ends[depth] - i - 1)
      return ocp_plan_reject(c->error, "record %u: the loop repeats %u records, but %s ends %u records later", i,
                             r->index, depth ? "the loop around it" : "its segment", ends[depth] - i - 1);
    ends[++depth] = i + 1 + r->index;
  }
  return true;
}

/* Checks the parameters of an upload: later records must be able to rely on the copy, so it has a constant size and is
 * never skipped. */
static bool check_upload(checker *c, uint32_t index) {
  const ocp_plan_record *r = &c->plan->records[index];
  const ocp_plan_param *p = c->plan->params + r->first_param;
  if (!has_params(r, c->plan->params, OCP_PARAM_POINTER, OCP_PARAM_POINTER, OCP_PARAM_I64) ||
      p[0].ref_kind != OCP_REF_BUFFER || p[1].ref_kind != OCP_REF_WEIGHT || p[2].reg != OCP_NO_REG || p[2].imm <= 0 ||
      r->condition_register != OCP_NO_REG)
    return ocp_plan_reject(
        c->error, "record %u: an upload must copy a weight to a buffer, with a constant size and without a condition",
        index);
  return true;
}

/* Checks that the records of a segment await each upload of the segment once, in order. */
static bool check_awaits(checker *c, uint32_t segment) {
  const ocp_plan *p = c->plan;
  const ocp_range range = p->views[segment].records;
  const uint32_t end = range.first + range.count;
  uint32_t upload = range.first; /* the first upload that is not awaited, at most `i` */
  for (uint32_t i = range.first; i < end; i++) {
    if (p->records[i].kind != OCP_RECORD_AWAIT)
      continue;
    while (upload < i && p->records[upload].kind != OCP_RECORD_UPLOAD)
      upload++;
    if (upload == i || p->records[i].index != upload || p->records[i].num_params ||
        p->records[i].condition_register != OCP_NO_REG)
      return ocp_plan_reject(c->error,
                             "record %u awaits record %u with %u parameters and %s condition, expected: the first "
                             "upload that is not awaited yet, no parameters, no condition",
                             i, p->records[i].index, p->records[i].num_params,
                             p->records[i].condition_register != OCP_NO_REG ? "a" : "no");
    upload++;
  }
  while (upload < end && p->records[upload].kind != OCP_RECORD_UPLOAD)
    upload++;
  return upload == end || ocp_plan_reject(c->error, "no record awaits record %u, an upload", upload);
}

static bool check_record(checker *c, uint32_t index) {
  const ocp_plan *p = c->plan;
  const ocp_plan_record *r = &p->records[index];
  if (r->node >= p->header.num_nodes)
    return ocp_plan_reject(c->error, "record %u belongs to node %u, but the plan has %u nodes", index, r->node,
                           p->header.num_nodes);
  if (!may_use(c, r->condition_register, "record", index) || !may_use(c, r->shared_register, "record", index))
    return false;
  switch (r->kind) {
  case OCP_RECORD_LAUNCH:
    if (r->index >= p->header.num_kernels)
      return ocp_plan_reject(c->error, "record %u launches kernel %u, but the plan has %u kernels", index, r->index,
                             p->header.num_kernels);
    for (int d = 0; d < 3; d++) {
      if (!uses(c, r->grid[d], "record", index))
        return false;
      if (r->block[d] == 0 || r->block[d] > 1024)
        return ocp_plan_reject(
            c->error, "record %u: got a block of %u x %u x %u threads, expected 1 to 1024 along each dimension", index,
            r->block[0], r->block[1], r->block[2]);
    }
    if ((uint64_t)r->block[0] * r->block[1] * r->block[2] > 1024 || r->num_params > OCP_MAX_LAUNCH_PARAMS)
      return ocp_plan_reject(
          c->error,
          "record %u: got %u x %u x %u threads and %u parameters, expected at most 1024 threads and %u parameters",
          index, r->block[0], r->block[1], r->block[2], r->num_params, OCP_MAX_LAUNCH_PARAMS);
    break;
  case OCP_RECORD_COPY:
    if (!has_params(r, p->params, OCP_PARAM_POINTER, OCP_PARAM_POINTER, OCP_PARAM_I64))
      return ocp_plan_reject(
          c->error, "record %u: a copy must have two pointers and an int64 size as parameters, in this order", index);
    break;
  case OCP_RECORD_MEMSET:
    if (!has_params(r, p->params, OCP_PARAM_POINTER, OCP_PARAM_I32, OCP_PARAM_I64))
      return ocp_plan_reject(
          c->error,
          "record %u: a memset must have a pointer, an int32 byte and an int64 size as parameters, in this order",
          index);
    break;
  case OCP_RECORD_LIBRARY:
    if (r->index >= p->header.num_problems)
      return ocp_plan_reject(c->error, "record %u runs library call %u, but the plan has %u library calls", index,
                             r->index, p->header.num_problems);
    break;
  case OCP_RECORD_CALL:
    for (uint32_t i = 0; i < r->num_params; i++) {
      const uint32_t kind = p->params[r->first_param + i].kind;
      if (kind != OCP_PARAM_POINTER && kind != OCP_PARAM_I64)
        return ocp_plan_reject(
            c->error, "record %u: a parameter of a callback has kind %u, expected a pointer or an int64", index, kind);
    }
    break;
  case OCP_RECORD_LOOP:
    if (r->num_params < 1 || r->num_params > 2 || p->params[r->first_param].kind != OCP_PARAM_POINTER ||
        p->params[r->first_param + r->num_params - 1].kind !=
            (r->num_params == 2 ? OCP_PARAM_I64 : OCP_PARAM_POINTER) ||
        r->condition_register != OCP_NO_REG)
      return ocp_plan_reject(
          c->error, "record %u: a loop must have a pointer and at most one int64 count as parameters, and no condition",
          index);
    break;
  case OCP_RECORD_UPLOAD:
    if (!check_upload(c, index))
      return false;
    break;
  case OCP_RECORD_AWAIT: /* check_awaits */
    break;
  default:
    return ocp_plan_reject(c->error, "record %u: unknown kind %u", index, r->kind);
  }
  for (uint32_t i = 0; i < r->num_params; i++)
    if (!check_param(c, index, &p->params[r->first_param + i]))
      return false;
  return true;
}

static bool check_buffers(checker *c) {
  const ocp_plan *p = c->plan;
  for (uint32_t i = 0; i < p->header.num_buffers; i++) {
    const ocp_plan_buffer *b = &p->buffers[i];
    if (b->segment >= p->header.num_segments || b->first_record > b->last_record ||
        b->last_record >= p->header.num_records || p->records[b->first_record].segment != b->segment)
      return ocp_plan_reject(c->error,
                             "buffer %u: got records %u to %u of segment %u as its lifetime, expected an ascending "
                             "range of the plan's %u records that begins in the segment",
                             i, b->first_record, b->last_record, b->segment, p->header.num_records);
  }
  return true;
}

/* Checks a segment, after the caller has checked all earlier segments. */
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
      return ocp_plan_reject(
          c->error,
          "assertion %u names node %u and the message at byte %u, but the plan has %u nodes and %u bytes of strings", i,
          a->node, a->message, p->header.num_nodes, p->header.strings_bytes);
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
  return check_loops(c, v) && check_awaits(c, segment);
}

bool ocp_plan_check(const ocp_plan *plan, ocp_error *error) {
  checker c = {plan, calloc(plan->header.num_registers + 1, sizeof *c.defined), error};
  if (!c.defined) {
    ocp_fail_memory(error);
    return false;
  }
  bool ok = check_strings(&c) && check_inputs(&c) && check_outputs(&c) && check_buffers(&c);
  for (uint32_t s = 0; ok && s < plan->header.num_segments; s++)
    ok = check_segment(&c, s);
  free(c.defined);
  return ok;
}
