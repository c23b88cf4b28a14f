/* Variants and instances. A variant binds a plan to the handles of a cluster; an instance is a variant evaluated for
 * one set of dimensions and host values.
 *
 * One Run at a time uses an instance; between Runs the instance is in its cluster's cache (instance_cache.h).
 *
 *     created, first segment resolved
 *                  |
 *                  v         put, at the end of the Run
 *             +---------+ -----------------------------> +-------------+   the next one is put   +----------+
 *             | in Run  |                                | last used   | ----------------------> | in table |
 *             +---------+ <----------------------------- +-------------+                         +----------+
 *                  ^          take: the same key                                                   |      |
 *                  +---------------------------------------------------------------- take ---------+      | evicted
 *                                                                                                         v
 *                                                                                                       freed
 *
 * Independently of these states, an instance becomes warm and may get a CUDA graph (replay.h):
 *
 *     +------+  warm_runs Runs   +------+  the next Run makes it  +--------------+  each Run: change nodes
 *     | cold | ----------------> | warm | ----------------------> | has a graph  | ----+  that hold other
 *     +------+                   +------+                         +--------------+ <---+  addresses, launch
 *        ^                          |                                    |
 *        |  cool: twice as many     | the driver or a library cannot     | the graph is released: the cluster has
 *        |  Runs as before          | make it: refused for ever          | too many graphs, or memory ran out
 *        +--------------------------|------------------------------------+
 *                                   v
 *                        (Runs enqueue its records one by one)
 *
 * If each Run has a new key, an instance that was used once passes its count of warm Runs and its graph to the next
 * instance of the same variant.
 *
 * Invariants:
 * - Registers, sizes, offsets and calls of a segment are valid once the segment is resolved: in the first segment as
 *   long as the instance lives, in later segments until the next Run, since read-backs decide them.
 * - `bases` holds addresses of the present Run. Pointer parameters hold them only after ocp_instance_set_pointers.
 * - An instance with a graph is taken only for streams whose work comes after the graph's latest launch. */
#ifndef OCP_RUN_INSTANCE_INSTANCE_STATE_H
#define OCP_RUN_INSTANCE_INSTANCE_STATE_H

#include "base/counters.h"
#include "device/device.h"
#include "driver/driver.h"
#include "plan/plan.h"
#include "run/instance/handles.h"
#include "vendor/problem.h"

/* A plan and the handles that its indices refer to. Immutable; lives as long as its cluster. */
typedef struct ocp_variant {
  const struct ocp_variant *next; /* the next older variant of the cluster */
  ocp_plan *plan;
  ocp_device *device;
  const char *cluster_name; /* owned by the cluster */
  CUfunction *functions;    /* the plan's kernels */
  const char **function_names;
  CUdeviceptr *weights;
  uint64_t *weight_bytes;
  ocp_problem **problems;
  ocp_call_fn *calls;    /* the cluster's callbacks */
  int64_t handle;        /* the cluster's handle, passed to callbacks */
  uint64_t first_source; /* source id of the plan's first record (sources.h) */
} ocp_variant;

/* One record, ready to be enqueued. */
typedef struct ocp_call {
  uint32_t kind; /* ocp_record_kind */
  bool skipped;
  unsigned grid[3], shared_bytes;
  uint32_t num_pointers; /* LIBRARY, CALL: number of pointers, which come first in `values`; the rest are numbers */
  uint64_t *values;      /* the parameters */
  void **params;         /* LAUNCH: kernelParams, pointing at values */
} ocp_call;

/* A pointer parameter that differs from Run to Run: values[value] = bases[base] + offset. */
typedef struct ocp_fixup {
  uint32_t value; /* index into the instance's values */
  uint32_t base; /* index of an input, num_inputs + index of an output, or num_inputs + num_outputs + segment: a slab */
  uint64_t offset;
} ocp_fixup;

/* The evaluation of a plan for one set of dimensions and host values, and the scratch memory of a Run. One Run at a
 * time uses an instance, which is then cached for the next Run with the same key. One allocation holds all its arrays.
 */
typedef struct ocp_instance {
  const ocp_variant *variant;
  struct ocp_instance *newer, *older, *chain; /* links of the cache */
  size_t bytes;
  /* the key */
  uint64_t hash;
  uint32_t key_words;
  const uint64_t *key;
  /* results of the evaluation */
  int64_t *registers;
  int64_t *dims;           /* dimensions of the outputs, in the order of the plan's dims */
  uint64_t *memory_bytes;  /* sizes of inputs, then of outputs */
  uint64_t *buffer_offset; /* in the slab of the buffer's segment */
  uint64_t *slab_bytes;    /* per segment */
  ocp_call *calls;         /* per record */
  uint64_t *values;        /* values of all parameters; a record's first value has the index first_param */
  ocp_fixup *fixups;       /* a segment's first fixup has the index pointers.first of its view */
  uint32_t *num_fixups;    /* per segment: fewer than in the plan if records are skipped */
  /* the CUDA graph of a warm instance: replay.h */
  struct ocp_replay *replay;
  void (*release_replay)(struct ocp_replay *replay);
  uint64_t replay_stream_id,
      replay_position;        /* of the graph's latest launch: its stream and sequence number (device/order.h) */
  uint32_t warm_runs;         /* number of Runs without a graph */
  uint32_t replay_evictions;  /* times that it lost its graph, or got none for lack of memory, at most 16; each
                                 doubles the number of warm Runs before the next graph */
  ocp_counter replay_refused; /* reason why it can never have a graph; 0: it can */
  bool is_fresh;              /* true: its calls have not been enqueued since they were filled */
  bool inherited;             /* true: the graph still has the parameters of the instance from which it was inherited */
  bool used_again;            /* true: a second Run had the same key */
  /* base addresses, set by each Run */
  uint64_t *bases;
  uint64_t *targets; /* addresses to which the outputs are bound; `bases` has scratch memory for redirected outputs:
                        aliasing.h */
  uint64_t *scratch; /* per segment: address of the scratch memory of redirected outputs; 0: no scratch */
  bool redirects;    /* true: an output is redirected */
  /* true: targets and known_inputs hold the addresses of the last Run, and is_redirected belongs to them */
  bool aliasing_is_known;
  uint64_t *known_inputs; /* addresses of the inputs */
  bool *is_redirected;    /* per output */
  uint64_t redirected_bytes;
  uint32_t *by_address; /* inputs, then outputs, sorted by address */
} ocp_instance;

#endif
