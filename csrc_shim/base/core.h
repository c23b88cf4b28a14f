/* What the parts of the shim share: errors, counters, devices, and the two tables through which C and Python know each
 * other. */
#ifndef OCP_BASE_CORE_H
#define OCP_BASE_CORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/ort_abi.h" /* generated from ort_cuda_plugin/abi by build_plugin.py */
#include "driver/driver.h"

#ifndef OCP_CORE_ABI /* of ocp_core and ocp_python; build_plugin.py makes it a hash of the headers */
#define OCP_CORE_ABI 0u
#endif
#define OCP_EP_NAME "CudaPluginExecutionProvider"

/* ---- errors: a code, a node where one is to blame, and a message; made into an OrtStatus at the boundary only ---- */
typedef struct ocp_error {
  int code; /* OrtErrorCode; 0: none */
  char text[1000];
} ocp_error;
/* Formats the message (truncating) and returns code. */
int ocp_fail(ocp_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)", with the code that fits. */
int ocp_fail_cuda(ocp_error *error, const ocp_driver *driver, CUresult result, const char *what);
OrtStatus *ocp_status(const ocp_error *error); /* NULL when error->code is 0 */

/* ---- the host: set when a factory is created, before any other callback can run ---- */
extern const OrtApi *ocp_api;
extern const OrtEpApi *ocp_ep_api;
/* min(OCP_NEWEST_API, the host's): goes into every ort_version_supported. A slot S newer than OCP_OLDEST_API may be set
 * or called only when ocp_api_version >= <Struct>_<S>_SINCE (ort_abi.h). */
extern uint32_t ocp_api_version;
/* The default logger of the environment, for what has no session; NULL before a factory is created. */
extern const OrtLogger *ocp_logger;

/* A line in the log of the environment, where there is one. */
void ocp_log(OrtLoggingLevel level, const char *text);

/* True in a child forked after ocp_watch_forks: neither Python nor CUDA works there. */
extern atomic_bool ocp_forked;
void ocp_watch_forks(void); /* called where Python or a device is first used */
#define OCP_FORKED_TEXT                                                                                                \
  "this process was forked from one that used the CUDA plugin; start it with the spawn or forkserver method"

/* True when the interpreter is going: free nothing, call no CUDA. */
bool ocp_is_shutting_down(void);

/* ---- counters: process wide, relaxed atomics; names in counters.c, read by ort_cuda_plugin.counters() ---- */
typedef enum ocp_counter {
  OCP_PYTHON_CALLS, /* calls from C into Python */
  OCP_RUNS,         /* Compute calls of compiled clusters */
  OCP_LAUNCHES,     /* kernels launched, one by one or by replays of automatic graphs */
  OCP_LIBRARY_CALLS,
  OCP_COPIES_H2D,
  OCP_COPIES_D2H,
  OCP_COPIES_D2D,
  OCP_PLAN_VARIANTS_BUILT,
  OCP_PLAN_HITS,
  OCP_HOST_VALUE_READS,
  OCP_KERNELS_COMPILED,  /* added to by Python through counter_add */
  OCP_KERNEL_CACHE_HITS, /* likewise */
  OCP_GRAPH_CAPTURES,    /* automatic CUDA graphs made, replayed, and their nodes changed */
  OCP_GRAPH_REPLAYS,
  OCP_GRAPH_UPDATES,
  OCP_GRAPH_FALLBACKS,            /* warm Runs without a graph, then by reason: */
  OCP_GRAPH_FALLBACKS_READ_BACK,  /* the host needs values in the middle of the Run */
  OCP_GRAPH_FALLBACKS_CAPTURING,  /* somebody captures the stream */
  OCP_GRAPH_FALLBACKS_CACHE_FULL, /* as many graphs as allowed are in use */
  OCP_GRAPH_FALLBACKS_MEMORY,     /* no memory for the graph */
  OCP_GRAPH_FALLBACKS_LIBRARY,    /* a library call cannot be captured */
  OCP_GRAPH_FALLBACKS_DRIVER,     /* the driver makes no graph of it */
  OCP_DEVICE_BYTES_IN_USE,        /* handed out and not yet freed: ORT's tensors, slabs, weights */
  OCP_PINNED_BYTES_IN_USE,
  OCP_WEIGHT_BYTES,
  OCP_STREAMS_LIVE,
  OCP_GRAPHS_LIVE, /* automatic ones */
  OCP_NUM_COUNTERS
} ocp_counter;
extern _Atomic int64_t ocp_counters[OCP_NUM_COUNTERS];
extern const char *const ocp_counter_names[OCP_NUM_COUNTERS];
static inline void ocp_count(ocp_counter counter, int64_t by) {
  atomic_fetch_add_explicit(&ocp_counters[counter], by, memory_order_relaxed);
}

/* ---- one CUDA or emulated device; made on first use, lives as long as the process ---- */
typedef struct ocp_device ocp_device; /* device/memory.h */

/* ---- opaque objects that cross the tables ---- */
typedef struct ocp_stream ocp_stream;   /* device/memory.h */
typedef struct ocp_cluster ocp_cluster; /* run/executor.h */
typedef struct ocp_weight ocp_weight;   /* run/executor.h */
typedef struct ocp_problem ocp_problem; /* vendor/problem.h */

#endif
