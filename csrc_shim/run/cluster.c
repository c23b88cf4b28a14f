#include "run/cluster.h"

#include <stdlib.h>
#include <string.h>

#include "device/memory/memory.h"
#include "plan/check.h"
#include "plan/format.h"
#include "plan/load.h"
#include "run/cluster_state.h"
#include "run/instance/instance.h"
#include "run/instance/instance_cache.h"
#include "run/instance/replay.h"
#include "run/instance/sources.h"

/* ---- the cluster and its handles ---- */

static void reclaim(ocp_reclaimer *self) {
  ocp_cluster_release_graphs((ocp_cluster *)(void *)((char *)self - offsetof(ocp_cluster, reclaimer)));
}

ocp_cluster *ocp_cluster_create(ocp_device *device, const char *name, ocp_build_fn build, int64_t handle) {
  ocp_cluster *cluster = calloc(1, sizeof *cluster);
  if (!cluster)
    return NULL;
  cluster->device = device;
  cluster->build = build;
  cluster->build_handle = handle;
  cluster->name = strdup(name);
  if (!cluster->name) {
    free(cluster);
    return NULL;
  }
  pthread_mutex_init(&cluster->setup, NULL);
  pthread_mutex_init(&cluster->build_mutex, NULL);
  pthread_cond_init(&cluster->build_done, NULL);
  ocp_instance_cache_init(&cluster->cache);
  cluster->replays.device = device;
  cluster->replays.cluster_name = cluster->name;
  cluster->replays.cache = &cluster->cache;
  cluster->reclaimer.reclaim = reclaim;
  ocp_reclaimer_add(device, &cluster->reclaimer);
  return cluster;
}

static void free_variant(ocp_variant *variant) {
  if (!variant)
    return;
  ocp_sources_remove(variant);
  ocp_plan_free(variant->plan);
  free(variant->functions);
  free(variant->function_names);
  free(variant->weights);
  free(variant->weight_bytes);
  free(variant->problems);
  free(variant->calls);
  free(variant);
}

static void free_kernels(ocp_kernel_ref *kernels, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    free((void *)kernels[i].name);
    free((void *)kernels[i].params);
  }
}

void ocp_cluster_release(ocp_cluster *cluster) {
  if (!cluster)
    return;
  ocp_reclaimer_remove(cluster->device, &cluster->reclaimer);
  ocp_instance_cache_destroy(&cluster->cache);
  for (const ocp_variant *variant = atomic_load(&cluster->variants), *next; variant; variant = next) {
    next = variant->next;
    free_variant((ocp_variant *)variant);
  }
  for (uint32_t i = 0; i < cluster->num_weights; i++)
    ocp_weight_release(cluster->weights[i]);
  free_kernels(cluster->kernels, cluster->num_kernels);
  free(cluster->kernels);
  free(cluster->weights);
  free(cluster->problems);
  free(cluster->callbacks);
  pthread_mutex_destroy(&cluster->setup);
  pthread_mutex_destroy(&cluster->build_mutex);
  pthread_cond_destroy(&cluster->build_done);
  free(cluster->name);
  free(cluster);
}

void ocp_cluster_set_graphs(ocp_cluster *cluster, uint32_t warm_runs, uint32_t max_graphs) {
  cluster->replays.warm_runs = warm_runs < OCP_MAX_WARM_RUNS ? warm_runs : OCP_MAX_WARM_RUNS;
  cluster->replays.max_replays = max_graphs;
}

void ocp_cluster_release_graphs(ocp_cluster *cluster) {
  for (ocp_replay *replay; (replay = ocp_instance_cache_take_replay(&cluster->cache));)
    ocp_replay_release(replay);
}

/* Grows an array of `count` elements to hold `more` additional ones. `array`: address of the pointer to the array. */
static bool grow(void *array, uint32_t count, uint32_t more, size_t element) {
  void *old;
  memcpy(&old, array, sizeof old);
  void *grown = realloc(old, ((size_t)count + more + 1) * element);
  if (grown)
    memcpy(array, &grown, sizeof grown);
  return grown != NULL;
}

static int add_kernels(ocp_cluster *cluster, const ocp_kernel_ref *kernels, uint32_t count, ocp_error *error) {
  const uint32_t first = cluster->num_kernels;
  if (!grow(&cluster->kernels, first, count, sizeof *cluster->kernels)) {
    ocp_fail_memory(error);
    return -1;
  }
  for (uint32_t i = 0; i < count; i++) {
    ocp_kernel_ref *kernel = &cluster->kernels[first + i];
    uint8_t *params = malloc(kernels[i].num_params + 1);
    *kernel = kernels[i];
    kernel->name = strdup(kernels[i].name);
    kernel->params = params;
    if (!kernel->name || !params) {
      free_kernels(cluster->kernels + first, i + 1);
      ocp_fail_memory(error);
      return -1;
    }
    memcpy(params, kernels[i].params, kernels[i].num_params);
  }
  cluster->num_kernels += count;
  return (int)first;
}

int ocp_cluster_add_kernels(ocp_cluster *cluster, const ocp_kernel_ref *kernels, uint32_t count, ocp_error *error) {
  pthread_mutex_lock(&cluster->setup);
  const int first = add_kernels(cluster, kernels, count, error);
  pthread_mutex_unlock(&cluster->setup);
  return first;
}

int ocp_cluster_add_weights(ocp_cluster *cluster, ocp_weight *const *weights, uint32_t count, ocp_error *error) {
  pthread_mutex_lock(&cluster->setup);
  int first = -1;
  if (grow(&cluster->weights, cluster->num_weights, count, sizeof *cluster->weights)) {
    first = (int)cluster->num_weights;
    memcpy(cluster->weights + first, weights, count * sizeof *weights);
    cluster->num_weights += count;
  } else {
    ocp_fail_memory(error);
  }
  pthread_mutex_unlock(&cluster->setup);
  return first;
}

int ocp_cluster_add_problem(ocp_cluster *cluster, ocp_problem *problem, ocp_error *error) {
  pthread_mutex_lock(&cluster->setup);
  int first = -1;
  if (grow(&cluster->problems, cluster->num_problems, 1, sizeof *cluster->problems)) {
    first = (int)cluster->num_problems++;
    cluster->problems[first] = problem;
  } else {
    ocp_fail_memory(error);
  }
  pthread_mutex_unlock(&cluster->setup);
  return first;
}

int ocp_cluster_add_callback(ocp_cluster *cluster, ocp_call_fn call, uint32_t num_pointers, uint32_t num_numbers,
                             ocp_error *error) {
  pthread_mutex_lock(&cluster->setup);
  int first = -1;
  if (grow(&cluster->callbacks, cluster->num_callbacks, 1, sizeof *cluster->callbacks)) {
    first = (int)cluster->num_callbacks++;
    cluster->callbacks[first] = (ocp_callback){call, num_pointers, num_numbers};
  } else {
    ocp_fail_memory(error);
  }
  pthread_mutex_unlock(&cluster->setup);
  return first;
}

int ocp_cluster_set_host_inputs(ocp_cluster *cluster, const uint32_t *inputs, uint32_t count, ocp_error *error) {
  if (count > OCP_MAX_HOST_INPUTS)
    return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                    "%s: the host must read %u inputs that determine shapes, at most %u are supported", cluster->name,
                    count, OCP_MAX_HOST_INPUTS);
  for (uint32_t i = 1; i < count; i++)
    if (inputs[i - 1] >= inputs[i])
      return ocp_fail(error, ORT_INVALID_ARGUMENT,
                      "%s: internal error: the inputs that the host reads are not in ascending order. Report the model",
                      cluster->name);
  if (atomic_load(&cluster->variants))
    return ocp_fail(
        error, ORT_INVALID_ARGUMENT,
        "%s: internal error: the inputs that the host reads were set after the first plan was added. Report the model",
        cluster->name);
  memcpy(cluster->host_inputs, inputs, count * sizeof *inputs);
  cluster->num_host_inputs = count;
  return ORT_OK;
}

int ocp_cluster_set_fed_inputs(ocp_cluster *cluster, const uint32_t *inputs, uint32_t count, ocp_error *error) {
  for (uint32_t i = 0; i < count; i++) {
    uint32_t position = 0;
    while (position < cluster->num_host_inputs && cluster->host_inputs[position] != inputs[i])
      position++;
    if (position == cluster->num_host_inputs)
      return ocp_fail(
          error, ORT_INVALID_ARGUMENT,
          "%s: internal error: input %u is marked as supplied by the application, but the host does not read "
          "the input. Report the model",
          cluster->name, inputs[i]);
    cluster->is_fed[position] = true;
  }
  return ORT_OK;
}

/* ---- plans ---- */

static bool is_host_input(const ocp_cluster *cluster, uint32_t input) {
  for (uint32_t i = 0; i < cluster->num_host_inputs; i++)
    if (cluster->host_inputs[i] == input)
      return true;
  return false;
}

static bool in_range(const uint32_t *indices, uint32_t count, uint32_t limit) {
  for (uint32_t i = 0; i < count; i++)
    if (indices[i] >= limit)
      return false;
  return true;
}

/* Whether the parameters of a launch match the kernel's in number and kind: with fewer, the driver would read beyond
 * the end of kernelParams. */
static bool takes(const ocp_kernel_ref *kernel, const ocp_plan_param *params, uint32_t count) {
  if (kernel->num_params != count)
    return false;
  for (uint32_t i = 0; i < count; i++)
    if (kernel->params[i] != (params[i].kind == OCP_PARAM_CONDITION ? OCP_PARAM_I64 : params[i].kind))
      return false;
  return true;
}

static bool problem_takes(const ocp_problem *problem, const ocp_plan_param *params, uint32_t count) {
  uint32_t pointers = 0, numbers = 0;
  for (uint32_t i = 0; i < count; i++) {
    pointers += params[i].kind == OCP_PARAM_POINTER;
    numbers += params[i].kind == OCP_PARAM_I64;
  }
  return pointers + numbers == count && ocp_problem_takes(problem, pointers, numbers);
}

/* Checks that uploads read weights in host memory only, and that all other records and the read-backs read weights in
 * device memory only. */
static bool check_weight_memory(const ocp_cluster *cluster, const ocp_plan *plan, ocp_error *error) {
  for (uint32_t i = 0; i < plan->header.num_records; i++) {
    const ocp_plan_record *record = &plan->records[i];
    for (uint32_t k = 0; k < record->num_params; k++) {
      const ocp_plan_param *param = &plan->params[record->first_param + k];
      if (param->kind != OCP_PARAM_POINTER || param->ref_kind != OCP_REF_WEIGHT)
        continue;
      const ocp_weight_memory memory = ocp_weight_memory_of(cluster->weights[plan->weights[param->ref_index]]);
      if ((memory == OCP_WEIGHT_ON_HOST) != (record->kind == OCP_RECORD_UPLOAD))
        return ocp_plan_reject(error, "record %u %s weight %u, which is in %s memory", i,
                               record->kind == OCP_RECORD_UPLOAD ? "uploads" : "reads", param->ref_index,
                               memory == OCP_WEIGHT_ON_HOST ? "host" : "device");
    }
  }
  for (uint32_t i = 0; i < plan->header.num_readbacks; i++)
    if (plan->readbacks[i].ref_kind == OCP_REF_WEIGHT &&
        ocp_weight_memory_of(cluster->weights[plan->weights[plan->readbacks[i].ref_index]]) == OCP_WEIGHT_ON_HOST)
      return ocp_plan_reject(error, "read-back %u reads a weight that is in host memory", i);
  return true;
}

static bool check_callback(const ocp_cluster *cluster, const ocp_plan *plan, uint32_t index, ocp_error *error) {
  const ocp_plan_record *record = &plan->records[index];
  const ocp_plan_param *params = plan->params + record->first_param;
  uint32_t pointers = 0;
  if (record->index >= cluster->num_callbacks)
    return ocp_plan_reject(error, "record %u calls callback %u, but %s has %u callbacks", index, record->index,
                           cluster->name, cluster->num_callbacks);
  for (uint32_t i = 0; i < record->num_params; i++)
    pointers += params[i].kind == OCP_PARAM_POINTER;
  const ocp_callback *callback = &cluster->callbacks[record->index];
  const uint32_t numbers = record->num_params - pointers;
  if (pointers != callback->num_pointers || numbers != callback->num_numbers)
    return ocp_plan_reject(
        error, "record %u calls callback %u of %s with %u pointers and %u numbers, expected %u and %u", index,
        record->index, cluster->name, pointers, numbers, callback->num_pointers, callback->num_numbers);
  return true;
}

/* Checks that the cluster has the kernels, weights, problems and callbacks that the plan refers to by index. */
static bool check_handles(const ocp_cluster *cluster, const ocp_plan *plan, ocp_error *error) {
  const ocp_plan_header *h = &plan->header;
  if (!in_range(plan->kernels, h->num_kernels, cluster->num_kernels) ||
      !in_range(plan->weights, h->num_weights, cluster->num_weights) ||
      !in_range(plan->problems, h->num_problems, cluster->num_problems))
    return ocp_plan_reject(
        error,
        "the plan refers to a kernel, weight or library call of %s by an index out of range, expected "
        "indices below %u, %u and %u",
        cluster->name, cluster->num_kernels, cluster->num_weights, cluster->num_problems);
  if (!check_weight_memory(cluster, plan, error))
    return false;
  for (uint32_t i = 0; i < h->num_records; i++) {
    const ocp_plan_record *record = &plan->records[i];
    if (record->kind == OCP_RECORD_LAUNCH &&
        !takes(&cluster->kernels[plan->kernels[record->index]], plan->params + record->first_param, record->num_params))
      return ocp_plan_reject(
          error,
          "record %u: the number or the kinds of its %u parameters do not match the kernel %s, which has "
          "%u parameters",
          i, record->num_params, cluster->kernels[plan->kernels[record->index]].name,
          cluster->kernels[plan->kernels[record->index]].num_params);
    if (record->kind == OCP_RECORD_LIBRARY && !problem_takes(cluster->problems[plan->problems[record->index]],
                                                             plan->params + record->first_param, record->num_params))
      return ocp_plan_reject(error, "the parameters of record %u do not match its library call", i);
    if (record->kind == OCP_RECORD_CALL && !check_callback(cluster, plan, i, error))
      return false;
  }
  for (uint32_t i = 0; i < h->num_inputs; i++)
    if ((plan->inputs[i].host_register != OCP_NO_REG) != is_host_input(cluster, i))
      return ocp_plan_reject(
          error, "input %u: the plan says that the host %s the input, but %s says that the host %s the input", i,
          plan->inputs[i].host_register != OCP_NO_REG ? "reads" : "does not read", cluster->name,
          is_host_input(cluster, i) ? "reads" : "does not read");
  if (cluster->num_host_inputs && cluster->host_inputs[cluster->num_host_inputs - 1] >= h->num_inputs)
    return ocp_plan_reject(error, "the plan has %u inputs, but the host reads input %u of %s", h->num_inputs,
                           cluster->host_inputs[cluster->num_host_inputs - 1], cluster->name);
  return true;
}

static ocp_variant *make_variant(const ocp_cluster *cluster, ocp_plan *plan) {
  const ocp_plan_header *h = &plan->header;
  ocp_variant *variant = calloc(1, sizeof *variant);
  if (!variant)
    return NULL;
  variant->device = cluster->device;
  variant->cluster_name = cluster->name;
  variant->functions = calloc(h->num_kernels + 1, sizeof *variant->functions);
  variant->function_names = calloc(h->num_kernels + 1, sizeof *variant->function_names);
  variant->weights = calloc(h->num_weights + 1, sizeof *variant->weights);
  variant->weight_bytes = calloc(h->num_weights + 1, sizeof *variant->weight_bytes);
  variant->problems = calloc(h->num_problems + 1, sizeof *variant->problems);
  variant->handle = cluster->build_handle;
  variant->calls = calloc(cluster->num_callbacks + 1, sizeof *variant->calls);
  if (!variant->functions || !variant->function_names || !variant->weights || !variant->weight_bytes ||
      !variant->problems || !variant->calls) {
    free_variant(variant);
    return NULL;
  }
  for (uint32_t i = 0; i < h->num_kernels; i++) {
    variant->functions[i] = cluster->kernels[plan->kernels[i]].function;
    variant->function_names[i] = cluster->kernels[plan->kernels[i]].name;
  }
  for (uint32_t i = 0; i < h->num_weights; i++) {
    variant->weights[i] = ocp_weight_address(cluster->weights[plan->weights[i]]);
    variant->weight_bytes[i] = ocp_weight_bytes(cluster->weights[plan->weights[i]]);
  }
  for (uint32_t i = 0; i < h->num_problems; i++)
    variant->problems[i] = cluster->problems[plan->problems[i]];
  for (uint32_t i = 0; i < cluster->num_callbacks; i++)
    variant->calls[i] = cluster->callbacks[i].call;
  variant->plan = plan;
  if (ocp_sources_add(variant))
    return variant;
  variant->plan = NULL; /* the caller frees it */
  free_variant(variant);
  return NULL;
}

int ocp_cluster_add_plan(ocp_cluster *cluster, const void *blob, size_t bytes, ocp_error *error) {
  ocp_plan *plan = ocp_plan_load(blob, bytes, error);
  if (!plan)
    return error->code;
  pthread_mutex_lock(&cluster->setup);
  const bool is_valid = check_handles(cluster, plan, error);
  ocp_variant *variant = is_valid ? make_variant(cluster, plan) : NULL;
  if (variant) {
    variant->next = atomic_load_explicit(&cluster->variants, memory_order_relaxed);
    atomic_store_explicit(&cluster->variants, variant, memory_order_release);
  }
  pthread_mutex_unlock(&cluster->setup);
  if (variant)
    return ORT_OK;
  ocp_plan_free(plan);
  return is_valid ? ocp_fail_memory(error) : error->code;
}
