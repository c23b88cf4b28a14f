/* Execution of a cluster in a Run: finds or makes the instance that the inputs need, then enqueues its segments.
 *
 *     make_key       element types, ranks, dimensions; values of host inputs, read back where they are on the device
 *     find_instance  takes the key's instance from the cache, else makes one of the newest variant whose guards hold,
 *                    else of a variant that the builder adds; if the most recent other instance enqueues the same work,
 *                    changes that instance's key instead
 *     bind_inputs    sets the addresses of inputs; uploads inputs in host memory that the device needs
 *     run_segment    for each segment: read back, resolve, outputs, slab, records; or launches the instance's graph
 *     aliasing_copy  copies outputs that were redirected because they share memory with another tensor (aliasing.h)
 *     put            returns the instance to the cache
 *
 * Invariants:
 * - A Run that finds its instance calls no Python, except in callbacks, to load a library's stored algorithm,
 *   and to replace a library call that is refused.
 * - No lock of the cluster is held while the builder runs. One thread at a time builds for a cluster; others that need
 *   a plan wait and then search again.
 * - Slabs and uploads are freed on the Run's stream as soon as the work that uses them is enqueued: stream order keeps
 *   other work from using the memory earlier.
 * - If a step fails, the instance returns to the cache, and all memory of the Run is freed. */
#include "run/executor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/counters.h"
#include "base/dtype.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/order.h"
#include "driver/driver.h"
#include "plan/format.h"
#include "plan/load.h"
#include "run/cluster_state.h"
#include "run/instance/aliasing.h"
#include "run/instance/calls.h"
#include "run/instance/host_values.h"
#include "run/instance/instance.h"
#include "run/instance/instance_cache.h"
#include "run/instance/replay.h"

typedef struct run {
  ocp_cluster *cluster;
  ocp_stream *stream;
  const ocp_input *inputs;
  uint32_t num_inputs;
  ocp_output_fn output;
  void *output_context;
  ocp_error *error;
  /* The key: element type, rank and dimensions of each input, then the host values. */
  uint64_t few_words[128], *key;
  uint32_t key_words;
  int64_t *host_values; /* part of the key */
  uint32_t *host_counts;
  bool wants_replay;
  CUdeviceptr uploads; /* device copies of inputs in host memory */
} run;

/* ---- the key ---- */

/* Returns the number of elements of a host input; UINT64_MAX, which no plan accepts, if a dimension is negative or the
 * product overflows. */
static uint64_t count_elements(const ocp_input *input) {
  uint64_t elements = 1;
  for (uint32_t d = 0; d < input->rank; d++)
    if (input->dims[d] < 0 || __builtin_mul_overflow(elements, (uint64_t)input->dims[d], &elements))
      return UINT64_MAX;
  return elements;
}

static int count_host_values(run *r, uint32_t *total) {
  const ocp_cluster *cluster = r->cluster;
  *total = 0;
  for (uint32_t i = 0; i < cluster->num_host_inputs; i++) {
    const ocp_input *input = &r->inputs[cluster->host_inputs[i]];
    const uint64_t elements = count_elements(input);
    if (elements > OCP_MAX_HOST_VALUES || !ocp_dtype_is_integer(input->dtype))
      return ocp_fail(
          r->error, ORT_INVALID_ARGUMENT,
          "%s: input %u, which determines shapes: got element type %u and %llu elements, expected an integer type or "
          "bool, and at most %u elements",
          cluster->name, cluster->host_inputs[i], input->dtype, (unsigned long long)elements, OCP_MAX_HOST_VALUES);
    r->host_counts[i] = (uint32_t)elements;
    *total += (uint32_t)elements;
  }
  return ORT_OK;
}

static int read_host_inputs(run *r) {
  const ocp_cluster *cluster = r->cluster;
  ocp_host_read reads[OCP_MAX_HOST_INPUTS];
  int64_t *values = r->host_values;
  for (uint32_t i = 0; i < cluster->num_host_inputs; i++) {
    const ocp_input *input = &r->inputs[cluster->host_inputs[i]];
    reads[i] = (ocp_host_read){.host = input->on_device ? NULL : input->data,
                               .device = input->on_device ? (CUdeviceptr)(uintptr_t)input->data : 0,
                               .dtype = input->dtype,
                               .count = r->host_counts[i],
                               .values = values};
    values += r->host_counts[i];
  }
  return ocp_host_values_read(r->stream, reads, cluster->num_host_inputs, r->error);
}

/* Whether ONNX Runtime or the application captures the Run (ort/data/capture.h, ort/data/recording.h), so that nothing
 * can be read back. */
static bool is_capturing(const run *r) { return atomic_load_explicit(&r->stream->capturing, memory_order_relaxed); }

static int fail_capture(const run *r, const char *why, uint32_t input) {
  return ocp_fail(r->error, ORT_NOT_IMPLEMENTED,
                  "%s: input %u %s, which a CUDA graph cannot capture. " OCP_WITHOUT_CAPTURE, r->cluster->name, input,
                  why);
}

static int make_key(run *r) {
  const ocp_cluster *cluster = r->cluster;
  r->key = r->few_words;
  for (uint32_t i = 0; i < r->num_inputs; i++) {
    if (r->inputs[i].rank > OCP_MAX_RANK)
      return ocp_fail(r->error, ORT_INVALID_ARGUMENT, "%s: input %u has rank %u, at most %u is supported",
                      cluster->name, i, r->inputs[i].rank, OCP_MAX_RANK);
    r->key_words += 1 + r->inputs[i].rank;
  }
  const uint32_t host_inputs = cluster->num_host_inputs;
  uint32_t num_values = 0;
  if (host_inputs) {
    if (cluster->host_inputs[host_inputs - 1] >= r->num_inputs)
      return ocp_fail(r->error, ORT_INVALID_ARGUMENT,
                      "%s: internal error: the Run has %u inputs, but shapes depend on input %u. Report the model",
                      cluster->name, r->num_inputs, cluster->host_inputs[host_inputs - 1]);
    if (count_host_values(r, &num_values) != ORT_OK)
      return r->error->code;
  }
  const uint32_t first_value = r->key_words;
  r->key_words += num_values;
  if (r->key_words > sizeof r->few_words / sizeof *r->few_words) {
    r->key = malloc(r->key_words * sizeof *r->key);
    if (!r->key)
      return ocp_fail_memory(r->error);
  }
  uint64_t *word = r->key;
  for (uint32_t i = 0; i < r->num_inputs; i++) {
    *word++ = (uint64_t)r->inputs[i].dtype << 32 | r->inputs[i].rank;
    for (uint32_t d = 0; d < r->inputs[i].rank; d++)
      *word++ = (uint64_t)r->inputs[i].dims[d];
  }
  r->host_values = (int64_t *)r->key + first_value;
  for (uint32_t i = 0; i < host_inputs; i++) {
    const bool on_device = r->inputs[cluster->host_inputs[i]].on_device;
    if ((on_device || cluster->is_fed[i]) && is_capturing(r))
      return fail_capture(r, on_device ? "determines shapes and must be copied to the host" : "is read on the host",
                          cluster->host_inputs[i]);
  }
  if (host_inputs && read_host_inputs(r) != ORT_OK)
    return r->error->code;
  return ORT_OK;
}

/* ---- the instance ---- */

/* Returns an instance of the newest variant whose guards hold; NULL if there is no such variant, or with the error if
 * its instance cannot be created. */
static ocp_instance *match(const run *r, const ocp_variant *newest) {
  for (const ocp_variant *variant = newest; variant; variant = variant->next) {
    if (!ocp_variant_accepts(variant, r->inputs, r->num_inputs, r->host_counts))
      continue;
    ocp_instance *instance = ocp_instance_create(variant, r->inputs, r->host_values, r->key, r->key_words, r->error);
    if (instance)
      return ocp_instance_cache_exchange(&r->cluster->cache, instance, r->stream);
    if (r->error->code != ORT_OK)
      return NULL;
  }
  return NULL;
}

/* Builds a variant. If another thread is building one, waits for it instead; if one newer than `seen` exists, does
 * nothing. In both cases the caller searches again. *built: whether this call built a variant. No mutex is held while
 * Python builds, and waiting threads hold nothing that Python could need. */
static int build_variant(const run *r, const ocp_variant *seen, bool *built) {
  ocp_cluster *cluster = r->cluster;
  pthread_mutex_lock(&cluster->build_mutex);
  const bool waited = cluster->building;
  while (cluster->building)
    pthread_cond_wait(&cluster->build_done, &cluster->build_mutex);
  *built = !waited && atomic_load(&cluster->variants) == seen;
  cluster->building = *built;
  pthread_mutex_unlock(&cluster->build_mutex);
  if (!*built)
    return ORT_OK;
  const int code = cluster->build(cluster->build_handle, r->inputs, r->num_inputs, r->host_values, r->host_counts,
                                  cluster->num_host_inputs, r->error);
  if (code != ORT_OK && r->error->code == ORT_OK)
    ocp_fail(r->error, ORT_FAIL, "%s: internal error: building a plan failed without a message. Report the model",
             cluster->name);
  pthread_mutex_lock(&cluster->build_mutex);
  cluster->building = false;
  pthread_cond_broadcast(&cluster->build_done);
  pthread_mutex_unlock(&cluster->build_mutex);
  return code;
}

/* Returns the instance for the Run's key; NULL with the error. */
static ocp_instance *find_instance(const run *r) {
  ocp_cluster *cluster = r->cluster;
  ocp_instance *instance = ocp_instance_cache_take(&cluster->cache, r->key, r->key_words, r->stream);
  for (bool built = false; !instance;) {
    const ocp_variant *newest = atomic_load_explicit(&cluster->variants, memory_order_acquire);
    instance = match(r, newest);
    if (instance && built)
      return instance; /* not a cache hit: this Run built the variant */
    if (instance || r->error->code != ORT_OK)
      break;
    if (built) {
      if (!newest || !ocp_variant_accepts(newest, r->inputs, r->num_inputs, r->host_counts) ||
          ocp_instance_refusal(newest, r->inputs, r->host_values, r->error) == ORT_OK)
        ocp_fail(
            r->error, ORT_FAIL,
            "%s: internal error: the guards of the plan that was built for these inputs refuse them. Please report it",
            cluster->name);
      return NULL;
    }
    if (is_capturing(r)) {
      ocp_fail(r->error, ORT_NOT_IMPLEMENTED,
               "%s: a plan for these inputs must be compiled first, which a CUDA graph cannot capture. Run "
               "once with inputs of these shapes before the capture",
               cluster->name);
      return NULL;
    }
    if (build_variant(r, newest, &built) != ORT_OK)
      return NULL;
  }
  if (instance)
    ocp_count(OCP_PLAN_HITS, 1);
  return instance;
}

/* ---- execution ---- */

/* Prefixes the error with `what`: the tensors that the error concerns. */
static int name_subject(const run *r, const char *what) {
  const ocp_error cause = *r->error;
  return ocp_fail(r->error, cause.code, "%s: %.900s", what, cause.text); /* ORT names the node */
}

static int name_output(const run *r, const ocp_plan *plan, uint32_t index) {
  char what[300];
  const uint32_t node = plan->outputs[index].node;
  if (node == OCP_NO_NODE)
    snprintf(what, sizeof what, "output %u", index);
  else
    snprintf(what, sizeof what, "output %u, of node '%.200s'", index, ocp_plan_node_name(plan, node));
  return name_subject(r, what);
}

static uint64_t align(uint64_t bytes) { return (bytes + 255) & ~(uint64_t)255; }

/* Sets the base addresses of the inputs; uploads those that are in host memory although the device needs them. */
static int bind_inputs(run *r, ocp_instance *instance) {
  const ocp_plan *plan = instance->variant->plan;
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < r->num_inputs; i++) {
    instance->bases[i] = (uint64_t)(uintptr_t)r->inputs[i].data;
    if (!r->inputs[i].on_device && plan->input_needs_device[i])
      bytes += align(instance->memory_bytes[i]);
    if (bytes && is_capturing(r))
      return fail_capture(r, "is copied from host memory", i);
  }
  if (bytes == 0)
    return ORT_OK;
  ocp_device *device = r->cluster->device;
  if (ocp_device_alloc(device, bytes, r->stream, &r->uploads, r->error) != ORT_OK)
    return name_subject(r, "inputs that came in host memory");
  CUdeviceptr next = r->uploads;
  for (uint32_t i = 0; i < r->num_inputs; i++) {
    const uint64_t size = instance->memory_bytes[i];
    if (r->inputs[i].on_device || !plan->input_needs_device[i] || size == 0)
      continue;
    const CUresult result = device->driver->MemcpyHtoDAsync(next, r->inputs[i].data, size, r->stream->handle);
    if (result != CUDA_SUCCESS)
      return ocp_device_fail(device, result, "copying an input to the device: cuMemcpyHtoDAsync", r->error);
    ocp_count(OCP_COPIES_H2D, 1);
    instance->bases[i] = next;
    next += align(size);
  }
  return ORT_OK;
}

static int read_back(const run *r, ocp_instance *instance, uint32_t segment) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range range = plan->views[segment].readbacks;
  if (range.count == 0)
    return ORT_OK;
  ocp_host_read *reads = calloc(range.count, sizeof *reads);
  if (!reads)
    return ocp_fail_memory(r->error);
  int code = ORT_OK;
  for (uint32_t i = 0; i < range.count && code == ORT_OK; i++) {
    const ocp_plan_readback *readback = &plan->readbacks[range.first + i];
    reads[i] = (ocp_host_read){
        .dtype = readback->dtype, .count = readback->count, .values = instance->registers + readback->dst};
    code = ocp_instance_locate(instance, readback, &reads[i].device, r->error);
  }
  if (code == ORT_OK)
    code = ocp_host_values_read(r->stream, reads, range.count, r->error);
  free(reads);
  return code;
}

/* Returns where the address of a segment's slab is stored; address 0: the segment has no slab. */
static uint64_t *slab_of(const ocp_instance *instance, uint32_t segment) {
  const ocp_plan_header *h = &instance->variant->plan->header;
  return &instance->bases[h->num_inputs + h->num_outputs + segment];
}

static void free_slab(const run *r, const ocp_instance *instance, uint32_t segment) {
  uint64_t *slab = slab_of(instance, segment);
  if (*slab)
    ocp_device_free(r->cluster->device, *slab, r->stream);
  *slab = 0;
}

static int run_segment(const run *r, ocp_instance *instance, uint32_t segment) {
  const ocp_plan *plan = instance->variant->plan;
  if (segment > 0 && is_capturing(r))
    return ocp_fail(r->error, ORT_NOT_IMPLEMENTED,
                    "%s: the host must read a size from the device, and a CUDA graph cannot capture "
                    "that. " OCP_WITHOUT_CAPTURE,
                    r->cluster->name);
  if (segment > 0 &&
      (read_back(r, instance, segment) != ORT_OK || ocp_instance_resolve(instance, segment, r->error) != ORT_OK))
    return r->error->code;
  const ocp_range outputs = plan->views[segment].outputs;
  for (uint32_t i = outputs.first; i < outputs.first + outputs.count; i++) {
    const uint32_t index = plan->output_order[i];
    const ocp_plan_output *out = &plan->outputs[index];
    void *data = NULL;
    if (r->output(r->output_context, index, instance->dims + out->first_dim, out->rank, &data, r->error) != 0) {
      if (r->error->code == ORT_OK)
        ocp_fail(r->error, ORT_FAIL, "the output could not be allocated");
      return name_output(r, plan, index);
    }
    instance->bases[r->num_inputs + index] = (uint64_t)(uintptr_t)data;
  }
  if (ocp_aliasing_resolve(instance, segment, r->stream, r->error) != ORT_OK)
    return name_subject(r, "outputs that share memory with inputs");
  if (ocp_aliasing_preserve(instance, segment, r->inputs, r->stream, r->error) != ORT_OK)
    return r->error->code;
  if (r->wants_replay) {
    bool launched;
    if (ocp_replay_run(&r->cluster->replays, instance, r->stream, &launched, r->error) != ORT_OK || launched)
      return r->error->code;
  }
  if (instance->slab_bytes[segment] && ocp_device_alloc(r->cluster->device, instance->slab_bytes[segment], r->stream,
                                                        slab_of(instance, segment), r->error) != ORT_OK)
    return name_subject(r, "intermediate tensors");
  const int code = ocp_instance_enqueue(instance, segment, r->stream, r->error);
  if (!plan->views[segment].keeps_slab)
    free_slab(r, instance, segment);
  return code;
}

static int execute(run *r, ocp_instance *instance) {
  const uint32_t num_segments = instance->variant->plan->header.num_segments;
  for (uint32_t s = 0; s < num_segments; s++)
    *slab_of(instance, s) = 0;
  ocp_aliasing_begin(instance);
  r->wants_replay = ocp_replay_is_due(&r->cluster->replays, instance, r->stream);
  int code = bind_inputs(r, instance);
  for (uint32_t s = 0; s < num_segments && code == ORT_OK; s++)
    code = run_segment(r, instance, s);
  if (code == ORT_OK)
    code = ocp_aliasing_copy(instance, r->stream, r->error);
  ocp_aliasing_release(instance, r->stream);
  for (uint32_t s = 0; s < num_segments; s++)
    free_slab(r, instance, s);
  if (r->uploads)
    ocp_device_free(r->cluster->device, r->uploads, r->stream);
  ocp_stream_enqueued(r->stream);
  if (instance->replay)
    ocp_instance_replayed(instance, r->stream);
  return code;
}

int ocp_cluster_run(ocp_cluster *cluster, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                    ocp_output_fn output, void *output_context, ocp_error *error) {
  uint32_t host_counts[OCP_MAX_HOST_INPUTS];
  run r;
  r.cluster = cluster;
  r.stream = stream;
  r.inputs = inputs;
  r.num_inputs = num_inputs;
  r.output = output;
  r.output_context = output_context;
  r.error = error;
  r.key = NULL;
  r.key_words = 0;
  r.host_counts = host_counts;
  r.uploads = 0;
  error->code = ORT_OK;
  ocp_count(OCP_RUNS, 1);
  OCP_STAY stay = ocp_device_enter(cluster->device, error);
  if (!stay.entered)
    return error->code;
  if (make_key(&r) == ORT_OK) {
    ocp_instance *instance = find_instance(&r);
    if (instance) {
      execute(&r, instance);
      ocp_instance_cache_put(&cluster->cache, instance);
    }
  }
  if (r.key != r.few_words)
    free(r.key);
  return error->code;
}
