#include "base/counters.h"

_Atomic int64_t ocp_counters[OCP_NUM_COUNTERS];

const char *const ocp_counter_names[OCP_NUM_COUNTERS] = {
    [OCP_PYTHON_CALLS] = "python_calls",
    [OCP_RUNS] = "runs",
    [OCP_LAUNCHES] = "launches",
    [OCP_LIBRARY_CALLS] = "library_calls",
    [OCP_COPIES_H2D] = "copies_h2d",
    [OCP_COPIES_D2H] = "copies_d2h",
    [OCP_COPIES_D2D] = "copies_d2d",
    [OCP_PLAN_VARIANTS_BUILT] = "plan_variants_built",
    [OCP_PLAN_HITS] = "plan_hits",
    [OCP_HOST_VALUE_READS] = "host_value_reads",
    [OCP_KERNELS_COMPILED] = "kernels_compiled",
    [OCP_KERNEL_CACHE_HITS] = "kernel_cache_hits",
    [OCP_GRAPH_CAPTURES] = "graph_captures",
    [OCP_GRAPH_REPLAYS] = "graph_replays",
    [OCP_GRAPH_UPDATES] = "graph_updates",
    [OCP_GRAPH_FALLBACKS] = "graph_fallbacks",
    [OCP_GRAPH_FALLBACKS_READ_BACK] = "graph_fallbacks_read_back",
    [OCP_GRAPH_FALLBACKS_CALL] = "graph_fallbacks_call",
    [OCP_GRAPH_FALLBACKS_CAPTURING] = "graph_fallbacks_capturing",
    [OCP_GRAPH_FALLBACKS_CACHE_FULL] = "graph_fallbacks_cache_full",
    [OCP_GRAPH_FALLBACKS_MEMORY] = "graph_fallbacks_memory",
    [OCP_GRAPH_FALLBACKS_LIBRARY] = "graph_fallbacks_library",
    [OCP_GRAPH_FALLBACKS_DRIVER] = "graph_fallbacks_driver",
    [OCP_DEVICE_BYTES_IN_USE] = "device_bytes_in_use",
    [OCP_PINNED_BYTES_IN_USE] = "pinned_bytes_in_use",
    [OCP_WEIGHT_BYTES] = "weight_bytes",
    [OCP_STREAMS_LIVE] = "streams_live",
    [OCP_GRAPHS_LIVE] = "graphs_live",
};
