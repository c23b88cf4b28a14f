/* Conditional nodes of graphs (CU_GRAPH_NODE_TYPE_CONDITIONAL): their handles, whose values kernels set by
 * cudaGraphSetConditional, and their bodies.
 *
 * CUDA's restrictions hold: exactly one node uses a handle, in the graph for which the handle was created; a body
 * contains only kernel, memcpy, memset, child graph and conditional nodes; a graph with conditional nodes has at most
 * one executable graph at a time, and cannot be a child graph. The nodes and parameters of a body cannot change in an
 * executable graph: callers make a new executable graph. */
#ifndef OCP_EMULATOR_WORK_CONDITIONAL_H
#define OCP_EMULATOR_WORK_CONDITIONAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"

/* The variable behind a handle. The graph for which it was made refers to it, and so do the nodes that use it. */
typedef struct emu_condition {
  atomic_int references;
  CUgraphConditionalHandle handle; /* a number that no other handle of the process has */
  uint64_t graph;                  /* identity of the graph for which it was made */
  atomic_bool is_used;             /* a node uses it */
  atomic_bool is_instantiated;     /* an executable graph with that node exists */
  bool assigns_default;            /* each launch of the graph sets the value to `initial` */
  unsigned initial;
  atomic_uint value;
  struct emu_condition *next; /* list of all conditions */
} emu_condition;

/* Makes a condition with one reference; NULL: out of memory. */
emu_condition *emu_condition_make(uint64_t graph, unsigned initial, bool assigns_default);
/* Returns the condition with this handle, with one more reference; NULL: there is none. */
emu_condition *emu_condition_find(CUgraphConditionalHandle handle);
emu_condition *emu_condition_share(emu_condition *condition);
void emu_condition_release(emu_condition *condition);

/* cudaGraphSetConditional, as kernels call it. A handle that does not exist is a finding (emulator/findings.h). */
void emu_set_conditional(uint64_t handle, uint32_t value);

#endif
