/* What a cluster holds; private to cluster.c and executor.c. */
#ifndef OCP_RUN_CLUSTER_H
#define OCP_RUN_CLUSTER_H

#include <pthread.h>

#include "run/instance_cache.h"

struct ocp_cluster {
  ocp_device *device;
  char *name;
  int64_t python_handle;
  uint32_t num_host_inputs;
  uint32_t host_inputs[OCP_MAX_HOST_INPUTS];
  /* Newest first. Read by Runs without a lock: variants are only ever added, and live as long as the cluster. */
  _Atomic(const ocp_variant *) variants;
  ocp_instance_cache cache;
  /* Automatic graphs: after so many warm Runs, and at most so many; 0: none. */
  uint32_t graph_warm_runs, max_graphs;
  atomic_uint num_graphs;
  atomic_ullong graph_bytes; /* of their slabs */
  atomic_bool said_refusal;
  ocp_reclaimer reclaimer; /* gives graphs up where memory runs out */
  pthread_mutex_t setup;   /* guards the arrays of handles and the adding of variants */
  uint32_t num_kernels, num_weights, num_problems;
  ocp_kernel_ref *kernels; /* names are owned */
  ocp_weight **weights;
  ocp_problem **problems;
  /* Building of variants: one thread at a time. */
  pthread_mutex_t build_mutex;
  pthread_cond_t build_done;
  bool building;
};

#endif
