#include "run/repeat.h"

#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "device/memory/memory.h"
#include "plan/format.h"
#include "run/instance/host_values.h"

struct ocp_repeat {
  ocp_device *device;
  ocp_repeat_part first, step, last;
  uint32_t num_inputs, num_states, most_sources;
  uint32_t *state_types;
  uint32_t numbers[]; /* storage of state_types, and of sources and results of the three clusters */
};

/* A state tensor (repeat.h) during a Run. */
typedef struct state {
  CUdeviceptr address;
  uint32_t rank;
  int64_t dims[OCP_MAX_RANK];
} state;

typedef struct iteration {
  const ocp_repeat *repeat;
  ocp_stream *stream;
  const uint32_t *results;
  state *made; /* the states that the running cluster outputs */
} iteration;

/* ---- creation ---- */

static bool is_valid(const ocp_repeat_spec *spec, const ocp_repeat_part *part, bool has_states) {
  const uint32_t sources = spec->num_states + spec->num_inputs;
  for (uint32_t i = 0; i < part->num_sources; i++)
    if (part->sources[i] >= sources || (!has_states && part->sources[i] < spec->num_states))
      return false;
  for (uint32_t i = 0; i < part->num_results; i++) {
    if (part->results[i] >= spec->num_states)
      return false;
    for (uint32_t k = 0; k < i; k++)
      if (part->results[k] == part->results[i])
        return false;
  }
  return part->cluster != NULL;
}

static uint32_t *take(uint32_t **next, const uint32_t *from, uint32_t count) {
  uint32_t *at = *next;
  if (count)
    memcpy(at, from, count * sizeof *at);
  *next += count;
  return at;
}

static ocp_repeat_part copy_part(const ocp_repeat_part *part, uint32_t **next) {
  ocp_repeat_part copy = *part;
  copy.sources = take(next, part->sources, part->num_sources);
  copy.results = take(next, part->results, part->num_results);
  return copy;
}

ocp_repeat *ocp_repeat_create(ocp_device *device, const ocp_repeat_spec *spec, ocp_error *error) {
  const ocp_repeat_part *parts[] = {&spec->first, &spec->step, &spec->last};
  bool valid = spec->num_states > 0 && spec->state_types[0] == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL &&
               spec->first.num_results == spec->num_states && spec->last.num_results == 0;
  size_t count = spec->num_states;
  for (uint32_t i = 0; i < spec->num_states; i++)
    valid &= ocp_dtype_bits(spec->state_types[i]) >= 8;
  uint32_t most_sources = 0;
  for (size_t i = 0; i < 3; i++) {
    valid &= is_valid(spec, parts[i], i > 0);
    count += (size_t)parts[i]->num_sources + parts[i]->num_results;
    most_sources = parts[i]->num_sources > most_sources ? parts[i]->num_sources : most_sources;
  }
  if (!valid) {
    ocp_fail(
        error, ORT_INVALID_ARGUMENT,
        "internal error: a search operator such as BeamSearch has invalid states, or invalid inputs or results of one "
        "of its parts. Report the model");
    return NULL;
  }
  ocp_repeat *self = calloc(1, sizeof *self + count * sizeof *self->numbers);
  if (!self) {
    ocp_fail_memory(error);
    return NULL;
  }
  uint32_t *next = self->numbers;
  self->device = device;
  self->num_inputs = spec->num_inputs;
  self->num_states = spec->num_states;
  self->most_sources = most_sources;
  self->state_types = take(&next, spec->state_types, spec->num_states);
  self->first = copy_part(&spec->first, &next);
  self->step = copy_part(&spec->step, &next);
  self->last = copy_part(&spec->last, &next);
  return self;
}

void ocp_repeat_release(ocp_repeat *repeat) { free(repeat); }

uint32_t ocp_repeat_num_inputs(const ocp_repeat *repeat) { return repeat->num_inputs; }

/* ---- a Run ---- */

static void free_state(const ocp_repeat *self, ocp_stream *stream, state *which) {
  if (which->address)
    ocp_device_free(self->device, which->address, stream);
  which->address = 0;
}

/* Allocates memory for a state that a cluster outputs. */
static int make_state(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                      ocp_error *error) {
  const iteration *it = context;
  const uint32_t number = it->results[index];
  state *made = &it->made[number];
  size_t bytes = ocp_dtype_bits(it->repeat->state_types[number]) / 8;
  for (uint32_t i = 0; i < rank; i++)
    if (dims[i] < 0 || __builtin_mul_overflow(bytes, (size_t)dims[i], &bytes))
      return ocp_fail(error, ORT_INVALID_ARGUMENT,
                      "a search operator such as BeamSearch: the size of a state overflows 64 bits. Check the shapes "
                      "of the inputs");
  if (ocp_device_alloc(it->repeat->device, bytes, it->stream, &made->address, error) != ORT_OK)
    return error->code;
  made->rank = rank;
  memcpy(made->dims, dims, rank * sizeof *dims);
  memcpy(data, &made->address, sizeof *data);
  return ORT_OK;
}

static void gather_sources(const ocp_repeat *self, const ocp_repeat_part *part, const state *states,
                           const ocp_input *inputs, ocp_input *sources) {
  for (uint32_t i = 0; i < part->num_sources; i++) {
    const uint32_t source = part->sources[i];
    if (source >= self->num_states) {
      sources[i] = inputs[source - self->num_states];
      continue;
    }
    const state *from = &states[source];
    sources[i] =
        (ocp_input){.dims = from->dims, .rank = from->rank, .dtype = self->state_types[source], .on_device = true};
    memcpy(&sources[i].data, &from->address, sizeof from->address);
  }
}

/* Runs the cluster `first` or `step`, and replaces states by its outputs. */
static int advance(const ocp_repeat *self, const ocp_repeat_part *part, ocp_stream *stream, const ocp_input *inputs,
                   state *states, state *made, ocp_input *sources, ocp_error *error) {
  iteration it = {.repeat = self, .stream = stream, .results = part->results, .made = made};
  gather_sources(self, part, states, inputs, sources);
  ocp_cluster_run(part->cluster, stream, sources, part->num_sources, make_state, &it, error);
  for (uint32_t i = 0; i < part->num_results; i++) {
    const uint32_t number = part->results[i];
    free_state(self, stream, &states[number]);
    states[number] = made[number];
    made[number].address = 0;
  }
  return error->code;
}

static int run(const ocp_repeat *self, ocp_stream *stream, const ocp_input *inputs, state *states, ocp_input *sources,
               ocp_output_fn output, void *output_context, ocp_error *error) {
  state *made = states + self->num_states;
  int64_t goes_on = 1;
  advance(self, &self->first, stream, inputs, states, made, sources, error);
  while (error->code == ORT_OK) {
    const ocp_host_read flag = {
        .device = states[0].address, .dtype = self->state_types[0], .count = 1, .values = &goes_on};
    if (ocp_host_values_read(stream, &flag, 1, error) != ORT_OK || !goes_on)
      break;
    advance(self, &self->step, stream, inputs, states, made, sources, error);
  }
  if (error->code == ORT_OK) {
    gather_sources(self, &self->last, states, inputs, sources);
    ocp_cluster_run(self->last.cluster, stream, sources, self->last.num_sources, output, output_context, error);
  }
  return error->code;
}

int ocp_repeat_run(const ocp_repeat *repeat, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                   ocp_output_fn output, void *output_context, ocp_error *error) {
  error->code = ORT_OK;
  if (num_inputs != repeat->num_inputs)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "internal error: a search operator such as BeamSearch got %u inputs, expected %u. Report the "
                    "model",
                    num_inputs, repeat->num_inputs);
  if (atomic_load_explicit(&stream->capturing, memory_order_relaxed))
    return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                    "the host must read after each iteration whether the loop continues, and a CUDA graph cannot "
                    "capture that. " OCP_WITHOUT_CAPTURE);
  state *states = calloc(2 * (size_t)repeat->num_states, sizeof *states);
  ocp_input *sources = calloc((size_t)repeat->most_sources + 1, sizeof *sources);
  OCP_STAY stay = ocp_device_enter(repeat->device, error);
  if (!states || !sources)
    ocp_fail_memory(error);
  else if (stay.entered)
    run(repeat, stream, inputs, states, sources, output, output_context, error);
  for (uint32_t i = 0; states && i < 2 * repeat->num_states; i++)
    free_state(repeat, stream, &states[i]);
  free(states);
  free(sources);
  return error->code;
}
