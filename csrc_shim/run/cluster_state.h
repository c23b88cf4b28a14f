/* State of a cluster; private to this folder. Types only. */
#ifndef OCP_RUN_CLUSTER_STATE_H
#define OCP_RUN_CLUSTER_STATE_H

#include <pthread.h>

#include "device/device.h"
#include "device/memory/memory.h"
#include "device/memory/weights.h"
#include "run/instance/handles.h"
#include "run/instance/instance_cache.h"
#include "run/instance/replay.h"
#include "vendor/problem.h"

typedef struct ocp_callback {
  ocp_call_fn call;
  uint32_t num_pointers, num_numbers;
} ocp_callback;

struct ocp_cluster {
  ocp_device *device;
  char *name;
  ocp_build_fn build;
  int64_t build_handle;
  uint32_t num_host_inputs;
  uint32_t host_inputs[OCP_MAX_HOST_INPUTS];
  bool is_fed[OCP_MAX_HOST_INPUTS]; /* per host input: see ocp_cluster_set_fed_inputs */
  /* List of variants, newest first. Runs read it without a lock: variants are only added, and live as long as the
   * cluster. */
  _Atomic(const ocp_variant *) variants;
  ocp_instance_cache cache;
  ocp_replay_budget replays;
  ocp_reclaimer reclaimer; /* releases graphs when memory runs out */
  pthread_mutex_t setup;   /* guards the arrays of handles and the adding of variants */
  uint32_t num_kernels, num_weights, num_problems, num_callbacks;
  ocp_kernel_ref *kernels; /* with copies of their names */
  ocp_weight **weights;
  ocp_problem **problems;
  ocp_callback *callbacks;
  /* Building of variants: one thread at a time. */
  pthread_mutex_t build_mutex;
  pthread_cond_t build_done;
  bool building;
};

#endif
