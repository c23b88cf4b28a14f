/* A plan in memory, as ocp_plan_load made it from a blob: checked, immutable, shared by threads. Types only. */
#ifndef OCP_PLAN_PLAN_H
#define OCP_PLAN_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/format.h"

typedef struct ocp_range {
  uint32_t first, count;
} ocp_range;

/* Ranges of the plan's arrays that belong to one segment. */
typedef struct ocp_segment_view {
  ocp_range exprs, asserts, readbacks, records;
  ocp_range outputs, buffers; /* ranges of output_order and buffer_order */
  bool keeps_slab;            /* true: a buffer outlives the segment */
  ocp_range pointers; /* range of ocp_instance.fixups: parameters that are addresses and differ from Run to Run */
} ocp_segment_view;

typedef struct ocp_plan {
  ocp_plan_header header;
  /* the blob's arrays, in a private copy */
  void *blob;
  const ocp_plan_input *inputs;
  const ocp_plan_output *outputs;
  const uint32_t *weights, *kernels, *problems, *dims;
  const ocp_plan_expr *exprs;
  const uint32_t *guards;
  const ocp_plan_assert *asserts;
  const ocp_plan_readback *readbacks;
  const ocp_plan_buffer *buffers;
  const ocp_plan_record *records;
  const ocp_plan_param *params;
  const ocp_plan_segment *segments;
  const ocp_plan_node *nodes;
  const uint32_t *record_nodes;
  const ocp_plan_in_place *in_place;
  const char *strings;
  /* derived from the arrays above */
  ocp_segment_view *views;                /* one per segment */
  uint32_t *output_order, *buffer_order;  /* indices of outputs and buffers, grouped by segment */
  uint32_t *buffer_last;                  /* per buffer: last record of its life; UINT32_MAX: the end of the Run */
  uint32_t *guard_exprs, num_guard_exprs; /* the expressions that guards depend on, in order */
  bool *input_needs_device;               /* per input: whether a record or read-back names it */
  uint32_t *input_end;        /* per input: the record after its last use by a record or read-back; 0: no use */
  uint32_t *output_begin;     /* per output: the first record that names it; UINT32_MAX: no record does */
  bool has_calls;             /* whether a record is a callback */
  bool has_loops;             /* whether a record is a loop */
  bool has_open_loops;        /* whether a loop has no count: without a CUDA graph, the host reads its condition */
  uint32_t uploads_in_flight; /* maximum number of uploads that are issued and not yet awaited */
} ocp_plan;

#endif
