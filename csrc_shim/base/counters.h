/* Process-wide counters (relaxed atomics), which ort_cuda_plugin.counters() returns. An automatic CUDA graph is one
 * that the plugin makes by itself for repeated Runs (run/instance/replay.h), as opposed to a capture that ONNX Runtime
 * or the application asks for. */
#ifndef OCP_BASE_COUNTERS_H
#define OCP_BASE_COUNTERS_H

#include <stdatomic.h>
#include <stdint.h>

typedef enum ocp_counter {
  OCP_PYTHON_CALLS, /* calls from C into Python */
  OCP_RUNS,         /* executions of clusters, not calls of session.run */
  OCP_LAUNCHES,     /* launches of the plugin's kernels, also by replays of automatic CUDA graphs; without the kernels
                       that a loop in such a graph launches */
  OCP_LIBRARY_CALLS,
  OCP_LIBRARY_REFUSALS, /* calls that cuBLASLt or cuDNN refused, each counted once: vendor/substitute.h */
  OCP_COPIES_H2D,
  OCP_COPIES_D2H,
  OCP_COPIES_D2D,
  OCP_COPIES_PEER,           /* tensors copied between the devices of a session: device/peers/peer_stream.h */
  OCP_BYTES_PEER,            /* bytes of the tensors that OCP_COPIES_PEER counts */
  OCP_WEIGHT_BYTES_STREAMED, /* bytes of weights that Runs copied from host memory: run/instance/uploads.h */
  OCP_PLAN_VARIANTS_BUILT,
  OCP_PLAN_HITS,
  OCP_HOST_VALUE_READS,
  OCP_OUTPUTS_REDIRECTED, /* outputs written to scratch memory first, because they share memory with another tensor:
                             run/instance/aliasing.h */
  OCP_KERNELS_COMPILED,   /* Python adds to this counter through counter_add */
  OCP_KERNEL_CACHE_HITS,  /* Python adds to this counter through counter_add */
  OCP_CANDIDATES_MEASURED,
  OCP_GRAPH_CAPTURES,             /* CUDA graphs made: automatic ones, and those of Runs that ONNX Runtime captures */
  OCP_GRAPH_REPLAYS,              /* launches of the graphs that OCP_GRAPH_CAPTURES counts */
  OCP_GRAPH_UPDATES,              /* nodes of automatic CUDA graphs whose parameters were changed */
  OCP_GRAPH_FALLBACKS,            /* executions of clusters that were due for an automatic CUDA graph, but ran without
                                     one; the counters OCP_GRAPH_FALLBACKS_... count them by reason */
  OCP_GRAPH_FALLBACKS_READ_BACK,  /* the host needs values in the middle of the Run */
  OCP_DEVICE_LOOPS,               /* loops in plans that Runs enqueued, or launched in a CUDA graph; not inner loops */
  OCP_DEVICE_LOOP_ITERATIONS,     /* iterations before which the host read a loop's condition; also of inner loops */
  OCP_GRAPH_FALLBACKS_CALL,       /* the Run calls Python, which a graph cannot do */
  OCP_GRAPH_FALLBACKS_CAPTURING,  /* ONNX Runtime or the application captures the stream */
  OCP_GRAPH_FALLBACKS_CACHE_FULL, /* the cluster has as many graphs as its limits allow, and Runs use all of them */
  OCP_GRAPH_FALLBACKS_MEMORY,     /* too little memory for the graph or its slab */
  OCP_GRAPH_FALLBACKS_LIBRARY,    /* a library call cannot be captured */
  OCP_GRAPH_FALLBACKS_DRIVER,     /* the driver cannot make a graph of the work */
  OCP_DEVICE_BYTES_IN_USE, /* device memory allocated and not yet freed, for example ORT's tensors, slabs, weights */
  OCP_PINNED_BYTES_IN_USE,
  OCP_WEIGHT_BYTES,      /* device memory of weights */
  OCP_HOST_WEIGHT_BYTES, /* pinned memory of weights that Runs copy to the device */
  OCP_STREAMS_LIVE,
  OCP_GRAPHS_LIVE, /* graphs that OCP_GRAPH_CAPTURES counts and that exist now */
  OCP_NUM_COUNTERS
} ocp_counter;
extern _Atomic int64_t ocp_counters[OCP_NUM_COUNTERS];
extern const char *const ocp_counter_names[OCP_NUM_COUNTERS];
static inline void ocp_count(ocp_counter counter, int64_t by) {
  atomic_fetch_add_explicit(&ocp_counters[counter], by, memory_order_relaxed);
}

#endif
