#include "run/aliasing.h"

#include "base/counters.h"
#include "device/device.h"
#include "device/memory.h"
#include "device/preserve.h"
#include "driver/driver.h"
#include "plan/load.h"

static uint64_t align(uint64_t bytes) { return (bytes + 255) & ~(uint64_t)255; }

/* Where a tensor is bound: [start, end). */
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

/* Whether an output, by its place in the plan's order, may overlap an input or an output before it. It says yes for
 * some empty tensors. Nearly every Run asks only this: it has no branches, so that a compiler makes vectors of it. */
static bool may_alias(const ocp_instance *instance, uint32_t position) {
  const ocp_plan *plan = instance->variant->plan;
  const extent own = output_extent(instance, plan->output_order[position]);
  const uint64_t *starts = instance->bases, *bytes = instance->memory_bytes;
  unsigned found = 0;
  for (uint32_t i = 0; i < plan->header.num_inputs; i++)
    found |= (unsigned)(starts[i] < own.end) & (unsigned)(own.start < starts[i] + bytes[i]);
  for (uint32_t i = 0; i < position; i++) {
    const extent other = output_extent(instance, plan->output_order[i]);
    found |= (unsigned)(other.start < own.end) & (unsigned)(own.start < other.end);
  }
  return found;
}

/* Whether the plan may write an output where it is bound while it reads an input that overlaps it. */
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
  instance->redirects = false;
  for (uint32_t s = 0; s < instance->variant->plan->header.num_segments; s++)
    instance->scratch[s] = 0;
}

int ocp_aliasing_resolve(ocp_instance *instance, uint32_t segment, ocp_stream *stream, ocp_error *error) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_range outputs = plan->views[segment].outputs;
  uint64_t *bases = instance->bases + plan->header.num_inputs, bytes = 0;
  const uint64_t *sizes = instance->memory_bytes + plan->header.num_inputs;
  for (uint32_t i = outputs.first; i < outputs.first + outputs.count; i++) {
    const uint32_t output = plan->output_order[i];
    instance->targets[output] = bases[output];
    if (may_alias(instance, i) && has_to_be_redirected(instance, i)) {
      bases[output] = 0;
      bytes += align(sizes[output]);
    }
  }
  if (bytes == 0)
    return ORT_OK;
  uint64_t next;
  if (ocp_device_alloc(instance->variant->device, bytes, stream, &next, error) != ORT_OK)
    return error->code;
  instance->scratch[segment] = next;
  instance->redirects = true;
  for (uint32_t i = outputs.first; i < outputs.first + outputs.count; i++) {
    const uint32_t output = plan->output_order[i];
    if (bases[output] == instance->targets[output])
      continue;
    bases[output] = next;
    next += align(sizes[output]);
  }
  return ORT_OK;
}

/* Whether an output gets the memory of an input, of which the plan changes nothing that it reads. */
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
      return ocp_device_fail(device, result, "copying an output to memory that it shares: cuMemcpyDtoDAsync", error);
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
