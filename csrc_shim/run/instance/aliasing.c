#include "run/instance/aliasing.h"

#include <string.h>

#include "base/counters.h"
#include "device/device.h"
#include "device/memory/memory.h"
#include "device/memory/preserve.h"
#include "driver/driver.h"
#include "plan/load.h"

static uint64_t align(uint64_t bytes) { return (bytes + 255) & ~(uint64_t)255; }

/* The address range of a bound tensor: [start, end). */
typedef struct extent {
  uint64_t start, end;
} extent;

static extent input_extent(const ocp_instance *instance, uint32_t input) {
  const uint64_t start = instance->bases[input];
  return (extent){start, start + instance->memory_bytes[input]};
}

static extent output_extent(const ocp_instance *instance, uint32_t output) {
  const uint64_t start = instance->targets[output];
  return (extent){start, start + instance->memory_bytes[instance->variant->plan->header.num_inputs + output]};
}

static bool overlaps(extent a, extent b) {
  return a.start < a.end && b.start < b.end && a.start < b.end && b.start < a.end;
}

/* Returns the address of input `number`, or of output `number` - num_inputs. */
static uint64_t start_of(const ocp_instance *instance, uint32_t number) {
  const uint32_t num_inputs = instance->variant->plan->header.num_inputs;
  return number < num_inputs ? instance->bases[number] : instance->targets[number - num_inputs];
}

/* Sorts inputs and outputs by address, by insertion sort: the order of the previous Run is nearly right. */
static void sort_by_address(const ocp_instance *instance, uint32_t count) {
  uint32_t *order = instance->by_address;
  for (uint32_t i = 1; i < count; i++) {
    const uint32_t number = order[i];
    const uint64_t start = start_of(instance, number);
    uint32_t k = i;
    for (; k > 0 && start_of(instance, order[k - 1]) > start; k--)
      order[k] = order[k - 1];
    order[k] = number;
  }
}

/* Whether an output overlaps another range. Visits the ranges in order of their addresses. */
static bool any_output_overlaps(const ocp_instance *instance) {
  const ocp_plan_header *h = &instance->variant->plan->header;
  const uint32_t count = h->num_inputs + h->num_outputs;
  uint64_t end_of_outputs = 0, end_of_all = 0;
  sort_by_address(instance, count);
  for (uint32_t i = 0; i < count; i++) {
    const uint32_t number = instance->by_address[i];
    const uint64_t start = start_of(instance, number), end = start + instance->memory_bytes[number];
    const bool is_output = number >= h->num_inputs;
    if (start == 0 || start == end)
      continue;
    if (start < (is_output ? end_of_all : end_of_outputs))
      return true;
    end_of_all = end > end_of_all ? end : end_of_all;
    if (is_output && end > end_of_outputs)
      end_of_outputs = end;
  }
  return false;
}

/* Whether the plan may write the output to its bound memory although the input overlaps that memory. is_same: both have
 * the same address range. */
static bool may_share(const ocp_plan *plan, uint32_t input, uint32_t output, bool is_same) {
  const ocp_sharing sharing = ocp_plan_sharing(plan, input, output);
  return sharing == OCP_SHARING_IN_ORDER || (is_same && sharing != OCP_SHARING_NONE);
}

static bool has_to_be_redirected(const ocp_instance *instance, uint32_t position) {
  const ocp_plan *plan = instance->variant->plan;
  const uint32_t output = plan->output_order[position];
  const extent own = output_extent(instance, output);
  for (uint32_t i = 0; i < plan->header.num_inputs; i++) {
    const extent other = input_extent(instance, i);
    const bool is_same = own.start == other.start && own.end == other.end;
    if (overlaps(own, other) && !may_share(plan, i, output, is_same))
      return true;
  }
  for (uint32_t i = 0; i < position; i++)
    if (overlaps(own, output_extent(instance, plan->output_order[i])))
      return true;
  return false;
}

void ocp_aliasing_begin(ocp_instance *instance) {
  const ocp_plan_header *h = &instance->variant->plan->header;
  instance->redirects = false;
  for (uint32_t s = 0; s < h->num_segments; s++)
    instance->scratch[s] = 0;
  /* Outputs of later segments are not allocated yet. */
  for (uint32_t i = 0; h->num_segments > 1 && i < h->num_outputs; i++)
    instance->targets[i] = 0;
}

/* Finds the outputs of a segment that must be redirected; returns the size in bytes of their scratch memory. Reuses the
 * result of the previous Run if the addresses are the same, as in most Runs. */
static uint64_t find_redirected(ocp_instance *instance, uint32_t segment) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range outputs = plan->views[segment].outputs;
  const uint32_t num_inputs = plan->header.num_inputs;
  const uint64_t *bound = instance->bases + num_inputs;
  bool changed = !instance->aliasing_is_known || plan->header.num_segments > 1 ||
                 memcmp(instance->known_inputs, instance->bases, num_inputs * sizeof *instance->bases) != 0;
  for (uint32_t i = outputs.first; i < outputs.first + outputs.count; i++) {
    const uint32_t output = plan->output_order[i];
    changed |= instance->targets[output] != bound[output];
    instance->targets[output] = bound[output];
  }
  if (!changed)
    return instance->redirected_bytes;
  memcpy(instance->known_inputs, instance->bases, num_inputs * sizeof *instance->bases);
  instance->aliasing_is_known = true;
  instance->redirected_bytes = 0;
  const bool any = any_output_overlaps(instance);
  for (uint32_t i = outputs.first; i < outputs.first + outputs.count; i++) {
    const uint32_t output = plan->output_order[i];
    instance->is_redirected[output] = any && has_to_be_redirected(instance, i);
    if (instance->is_redirected[output])
      instance->redirected_bytes += align(instance->memory_bytes[num_inputs + output]);
  }
  return instance->redirected_bytes;
}

int ocp_aliasing_resolve(ocp_instance *instance, uint32_t segment, ocp_stream *stream, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range outputs = plan->views[segment].outputs;
  const uint32_t num_inputs = plan->header.num_inputs;
  const uint64_t bytes = find_redirected(instance, segment);
  uint64_t next;
  if (bytes == 0)
    return ORT_OK;
  if (ocp_device_alloc(instance->variant->device, bytes, stream, &next, error) != ORT_OK)
    return error->code;
  instance->scratch[segment] = next;
  instance->redirects = true;
  for (uint32_t i = outputs.first; i < outputs.first + outputs.count; i++) {
    const uint32_t output = plan->output_order[i];
    if (!instance->is_redirected[output])
      continue;
    instance->bases[num_inputs + output] = next;
    next += align(instance->memory_bytes[num_inputs + output]);
  }
  return ORT_OK;
}

/* Whether an output is bound to the memory of an input with which it shares by OCP_IN_PLACE_KEPT: the Run does not
 * change the bytes that it reads, for example when it appends rows to a K/V cache. */
static bool is_kept(const ocp_instance *instance, uint32_t output) {
  const ocp_plan *plan = instance->variant->plan;
  const extent own = output_extent(instance, output);
  for (uint32_t i = 0; i < plan->header.num_inputs; i++) {
    const extent other = input_extent(instance, i);
    if (own.start == other.start && own.end == other.end && ocp_plan_sharing(plan, i, output) == OCP_SHARING_KEPT)
      return true;
  }
  return false;
}

int ocp_aliasing_preserve(const ocp_instance *instance, uint32_t segment, const ocp_input *inputs, ocp_stream *stream,
                          ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range outputs = plan->views[segment].outputs;
  if (!ocp_preserve_is_wanted(instance->variant->device))
    return ORT_OK;
  for (uint32_t i = 0; segment == 0 && i < plan->header.num_inputs; i++)
    if (inputs[i].on_device && ocp_preserve_reads(instance->bases[i], instance->memory_bytes[i], error) != ORT_OK)
      return error->code;
  for (uint32_t i = outputs.first; i < outputs.first + outputs.count; i++) {
    const uint32_t output = plan->output_order[i];
    if (ocp_preserve_writes(instance->targets[output], instance->memory_bytes[plan->header.num_inputs + output],
                            is_kept(instance, output), stream, error) != ORT_OK)
      return error->code;
  }
  return ORT_OK;
}

int ocp_aliasing_copy(const ocp_instance *instance, ocp_stream *stream, ocp_error *error) {
  const ocp_plan_header *h = &instance->variant->plan->header;
  ocp_device *device = instance->variant->device;
  for (uint32_t i = 0; instance->redirects && i < h->num_outputs; i++) {
    const uint32_t output = instance->variant->plan->output_order[i], base = h->num_inputs + output;
    if (instance->bases[base] == instance->targets[output])
      continue;
    const CUresult result = device->driver->MemcpyDtoDAsync(instance->targets[output], instance->bases[base],
                                                            instance->memory_bytes[base], stream->handle);
    if (result != CUDA_SUCCESS)
      return ocp_device_fail(device, result, "copying an output to memory shared with an input: cuMemcpyDtoDAsync",
                             error);
    ocp_count(OCP_COPIES_D2D, 1);
    ocp_count(OCP_OUTPUTS_REDIRECTED, 1);
  }
  return ORT_OK;
}

void ocp_aliasing_release(ocp_instance *instance, ocp_stream *stream) {
  for (uint32_t s = 0; instance->redirects && s < instance->variant->plan->header.num_segments; s++) {
    if (instance->scratch[s])
      ocp_device_free(instance->variant->device, instance->scratch[s], stream);
    instance->scratch[s] = 0;
  }
}
