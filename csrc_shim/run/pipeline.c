#include "run/pipeline.h"

#include <stdlib.h>
#include <string.h>

#include "base/counters.h"
#include "base/dtype.h"
#include "device/memory/memory.h"
#include "device/peers/peer_stream.h"
#include "plan/format.h"

#define NO_OUTPUT UINT32_MAX

struct ocp_pipeline {
  uint32_t num_devices, num_stages, num_inputs, num_values, num_outputs, most_sources;
  ocp_device **devices;
  ocp_pipeline_stage *stages;
  uint32_t *types;     /* by value, of the values after the inputs */
  uint32_t *outputs;   /* by output: its value */
  uint32_t *output_of; /* by value: index of the node's output that has it, or NO_OUTPUT */
  uint32_t numbers[];  /* storage of the three arrays above and of the arrays of the stages */
};

/* A value in a Run. */
typedef struct value {
  const int64_t *dims; /* of an input, or `made_dims` */
  int64_t made_dims[OCP_MAX_RANK];
  uint32_t rank, dtype;
  size_t bytes;
  uint32_t home;    /* index of the device that has computed it; of an input: 0 */
  const void *host; /* an input in host memory; NULL: on devices */
  void *to; /* an output that shares memory with another tensor: its memory, which is written after all stages; else
               NULL */
} value;

/* The copy of a value on a device. */
typedef struct copy {
  CUdeviceptr address; /* 0: the device has no copy */
  bool owned;          /* false: memory of ORT */
} copy;

typedef struct run {
  const ocp_pipeline *self;
  const ocp_pipeline_stage *stage; /* the stage that runs */
  const ocp_input *inputs;
  ocp_output_fn output;
  void *output_context;
  value *values;
  copy *copies;         /* of value v on device d: copies[v * num_devices + d] */
  ocp_stream **streams; /* by device */
  ocp_input *sources;   /* the inputs of the stage that runs */
} run;

/* ---- creation ---- */

static bool is_valid(const ocp_pipeline_spec *spec) {
  bool valid = spec->num_devices > 0 && spec->num_stages > 0 && spec->num_values >= spec->num_inputs;
  uint32_t known = spec->num_inputs; /* number of values that the inputs and the stages so far have */
  for (uint32_t s = 0; s < spec->num_stages && valid; s++) {
    const ocp_pipeline_stage *stage = &spec->stages[s];
    valid = stage->cluster && stage->device < spec->num_devices;
    for (uint32_t i = 0; i < stage->num_sources; i++)
      valid &= stage->sources[i] < known;
    for (uint32_t i = 0; i < stage->num_results; i++)
      valid &= stage->results[i] == known++;
  }
  valid &= known == spec->num_values;
  for (uint32_t v = spec->num_inputs; v < spec->num_values && valid; v++)
    valid &= ocp_dtype_bits(spec->types[v - spec->num_inputs]) > 0;
  for (uint32_t i = 0; i < spec->num_outputs; i++)
    valid &= spec->outputs[i] >= spec->num_inputs && spec->outputs[i] < spec->num_values;
  return valid;
}

static uint32_t *take(uint32_t **next, const uint32_t *from, uint32_t count) {
  uint32_t *at = *next;
  if (count)
    memcpy(at, from, count * sizeof *at);
  *next += count;
  return at;
}

static void fill(ocp_pipeline *self, const ocp_pipeline_spec *spec) {
  uint32_t *next = self->numbers;
  memcpy(self->devices, spec->devices, spec->num_devices * sizeof *self->devices);
  for (uint32_t s = 0; s < spec->num_stages; s++) {
    const ocp_pipeline_stage *from = &spec->stages[s];
    ocp_pipeline_stage *stage = &self->stages[s];
    *stage = *from;
    stage->sources = take(&next, from->sources, from->num_sources);
    stage->only_shapes = take(&next, from->only_shapes, from->num_sources);
    stage->results = take(&next, from->results, from->num_results);
  }
  self->types = take(&next, spec->types, spec->num_values - spec->num_inputs);
  self->outputs = take(&next, spec->outputs, spec->num_outputs);
  self->output_of = next;
  for (uint32_t v = 0; v < spec->num_values; v++)
    self->output_of[v] = NO_OUTPUT;
  for (uint32_t i = 0; i < spec->num_outputs; i++)
    self->output_of[spec->outputs[i]] = i;
}

ocp_pipeline *ocp_pipeline_create(const ocp_pipeline_spec *spec, ocp_error *error) {
  if (!is_valid(spec)) {
    ocp_fail(error, ORT_INVALID_ARGUMENT,
             "internal error: a cluster that is split over several devices has invalid stages. Report the model");
    return NULL;
  }
  size_t count = 2 * (size_t)spec->num_values + spec->num_outputs;
  uint32_t most_sources = 0;
  for (uint32_t s = 0; s < spec->num_stages; s++) {
    const ocp_pipeline_stage *stage = &spec->stages[s];
    count += 2 * (size_t)stage->num_sources + stage->num_results;
    most_sources = stage->num_sources > most_sources ? stage->num_sources : most_sources;
  }
  ocp_pipeline *self = calloc(1, sizeof *self + count * sizeof *self->numbers);
  if (self) {
    self->devices = calloc(spec->num_devices, sizeof(ocp_device *));
    self->stages = calloc(spec->num_stages, sizeof *self->stages);
  }
  if (!self || !self->devices || !self->stages) {
    ocp_pipeline_release(self);
    ocp_fail_memory(error);
    return NULL;
  }
  self->num_devices = spec->num_devices;
  self->num_stages = spec->num_stages;
  self->num_inputs = spec->num_inputs;
  self->num_values = spec->num_values;
  self->num_outputs = spec->num_outputs;
  self->most_sources = most_sources;
  fill(self, spec);
  return self;
}

void ocp_pipeline_release(ocp_pipeline *pipeline) {
  if (!pipeline)
    return;
  free(pipeline->devices);
  free(pipeline->stages);
  free(pipeline);
}

uint32_t ocp_pipeline_num_inputs(const ocp_pipeline *pipeline) { return pipeline->num_inputs; }

/* ---- a Run ---- */

static copy *copy_of(const run *r, uint32_t v, uint32_t device) {
  return &r->copies[(size_t)v * r->self->num_devices + device];
}

static int set_bytes(value *v, ocp_error *error) {
  size_t elements = 1;
  bool overflow = false;
  for (uint32_t i = 0; i < v->rank; i++)
    overflow |= v->dims[i] < 0 || __builtin_mul_overflow(elements, (size_t)v->dims[i], &elements);
  overflow |= __builtin_mul_overflow(elements, (size_t)ocp_dtype_bits(v->dtype), &v->bytes);
  v->bytes = v->bytes / 8 + (v->bytes % 8 != 0);
  return overflow ? ocp_fail(error, ORT_INVALID_ARGUMENT,
                             "a tensor of a cluster on several devices: its size overflows 64 bits. Check the shapes "
                             "of the inputs")
                  : ORT_OK;
}

static int own(const run *r, uint32_t v, uint32_t device, ocp_error *error) {
  copy *to = copy_of(r, v, device);
  if (ocp_device_alloc(r->self->devices[device], r->values[v].bytes, r->streams[device], &to->address, error) != ORT_OK)
    return error->code;
  to->owned = true;
  return ORT_OK;
}

/* Copies a value to a device that lacks it. */
static int fetch(const run *r, uint32_t v, uint32_t device, ocp_error *error) {
  const uint32_t home = r->values[v].home;
  if (r->values[v].host || copy_of(r, v, device)->address)
    return ORT_OK;
  if (own(r, v, device, error) != ORT_OK)
    return error->code;
  return ocp_peer_copy(r->streams[device], copy_of(r, v, device)->address, r->streams[home],
                       copy_of(r, v, home)->address, r->values[v].bytes, error);
}

/* Whether the memory overlaps that of an input of the node, or of an output that a stage has written to ORT's memory.
 */
static bool overlaps_tensor(const run *r, const void *data, size_t bytes) {
  const uintptr_t at = (uintptr_t)data;
  bool overlaps = false;
  for (uint32_t v = 0; v < r->self->num_values; v++) {
    const copy *other = copy_of(r, v, 0);
    const uintptr_t start = (uintptr_t)other->address;
    overlaps |= start && !other->owned && at < start + r->values[v].bytes && start < at + bytes;
  }
  return overlaps;
}

/* Allocates an output of the stage that runs. The memory is ORT's if the output is one of the node, the stage runs on
 * the first device, and the memory overlaps no other tensor. */
static int make_result(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data,
                       ocp_error *error) {
  const run *r = context;
  const uint32_t number = r->stage->results[index], device = r->stage->device;
  const uint32_t output = r->self->output_of[number];
  value *made = &r->values[number];
  if (rank > OCP_MAX_RANK)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "a tensor of a cluster on several devices: got rank %u, expected at most %d. Report the model",
                    rank, OCP_MAX_RANK);
  *made = (value){.rank = rank, .dtype = r->self->types[number - r->self->num_inputs], .home = device};
  memcpy(made->made_dims, dims, rank * sizeof *dims);
  made->dims = made->made_dims;
  if (set_bytes(made, error) != ORT_OK)
    return error->code;
  copy *to = copy_of(r, number, device);
  if (device == 0 && output != NO_OUTPUT) {
    const int code = r->output(r->output_context, output, dims, rank, data, error);
    if (code != ORT_OK)
      return code;
    if (!overlaps_tensor(r, *data, made->bytes)) {
      to->address = (CUdeviceptr)(uintptr_t)*data;
      return ORT_OK;
    }
    made->to = *data;
  }
  if (own(r, number, device, error) != ORT_OK)
    return error->code;
  memcpy(data, &to->address, sizeof *data);
  return ORT_OK;
}

static void set_source(const run *r, const ocp_pipeline_stage *stage, uint32_t index) {
  const uint32_t number = stage->sources[index];
  const value *v = &r->values[number];
  ocp_input *source = &r->sources[index];
  *source = (ocp_input){.dims = v->dims, .rank = v->rank, .dtype = v->dtype, .on_device = !v->host, .data = v->host};
  if (!v->host && !stage->only_shapes[index])
    memcpy(&source->data, &copy_of(r, number, stage->device)->address, sizeof source->data);
}

static int run_stage(run *r, const ocp_pipeline_stage *stage, ocp_error *error) {
  for (uint32_t i = 0; i < stage->num_sources; i++) {
    if (!stage->only_shapes[i] && fetch(r, stage->sources[i], stage->device, error) != ORT_OK)
      return error->code;
    set_source(r, stage, i);
  }
  r->stage = stage;
  return ocp_cluster_run(stage->cluster, r->streams[stage->device], r->sources, stage->num_sources, make_result, r,
                         error);
}

static int set_inputs(const run *r, ocp_error *error) {
  for (uint32_t i = 0; i < r->self->num_inputs; i++) {
    const ocp_input *input = &r->inputs[i];
    value *v = &r->values[i];
    *v = (value){.dims = input->dims, .rank = input->rank, .dtype = input->dtype};
    if (set_bytes(v, error) != ORT_OK)
      return error->code;
    if (input->on_device)
      copy_of(r, i, 0)->address = (CUdeviceptr)(uintptr_t)input->data;
    else
      v->host = input->data;
  }
  return ORT_OK;
}

/* Copies the node's inputs to the other devices that read them, before any stage runs, because stages may overwrite the
 * inputs. */
static int spread_inputs(const run *r, ocp_error *error) {
  const ocp_pipeline *self = r->self;
  for (uint32_t s = 0; s < self->num_stages; s++)
    for (uint32_t i = 0; i < self->stages[s].num_sources; i++) {
      const ocp_pipeline_stage *stage = &self->stages[s];
      if (stage->sources[i] < self->num_inputs && !stage->only_shapes[i] && copy_of(r, stage->sources[i], 0)->address &&
          fetch(r, stage->sources[i], stage->device, error) != ORT_OK)
        return error->code;
    }
  return ORT_OK;
}

static int copy_redirected(const run *r, CUdeviceptr dst, CUdeviceptr src, size_t bytes, ocp_error *error) {
  ocp_device *device = r->self->devices[0];
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  const CUresult result =
      bytes ? device->driver->MemcpyDtoDAsync(dst, src, bytes, r->streams[0]->handle) : CUDA_SUCCESS;
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "copying an output to memory shared with another tensor: cuMemcpyDtoDAsync",
                           error);
  ocp_count(OCP_COPIES_D2D, 1);
  ocp_count(OCP_OUTPUTS_REDIRECTED, 1);
  return ORT_OK;
}

/* Copies to ORT's memory the outputs that stages have written elsewhere. */
static int give_outputs(const run *r, ocp_error *error) {
  for (uint32_t i = 0; i < r->self->num_outputs; i++) {
    const uint32_t number = r->self->outputs[i];
    value *v = &r->values[number];
    if (v->home == 0 && !v->to)
      continue;
    if (!v->to && r->output(r->output_context, i, v->dims, v->rank, &v->to, error) != ORT_OK)
      return error->code;
    const CUdeviceptr from = copy_of(r, number, v->home)->address, to = (CUdeviceptr)(uintptr_t)v->to;
    if (v->home != 0) {
      if (ocp_peer_copy(r->streams[0], to, r->streams[v->home], from, v->bytes, error) != ORT_OK)
        return error->code;
    } else if (copy_redirected(r, to, from, v->bytes, error) != ORT_OK) {
      return error->code;
    }
  }
  return ORT_OK;
}

static int run_stages(run *r, ocp_error *error) {
  const ocp_pipeline *self = r->self;
  for (uint32_t d = 0; d < self->num_devices; d++)
    if (ocp_peer_stream(r->streams[0], self->devices[d], &r->streams[d], error) != ORT_OK)
      return error->code;
  if (set_inputs(r, error) != ORT_OK || spread_inputs(r, error) != ORT_OK)
    return error->code;
  for (uint32_t s = 0; s < self->num_stages; s++)
    if (run_stage(r, &self->stages[s], error) != ORT_OK)
      return error->code;
  return give_outputs(r, error);
}

static void free_copies(const run *r) {
  const ocp_pipeline *self = r->self;
  for (uint32_t v = 0; v < self->num_values; v++)
    for (uint32_t d = 0; d < self->num_devices; d++) {
      const copy *at = copy_of(r, v, d);
      if (at->owned)
        ocp_device_free(self->devices[d], at->address, r->streams[d]);
    }
}

int ocp_pipeline_run(const ocp_pipeline *pipeline, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                     ocp_output_fn output, void *output_context, ocp_error *error) {
  error->code = ORT_OK;
  if (num_inputs != pipeline->num_inputs)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "internal error: a cluster on several devices got %u inputs, expected %u. Report the model",
                    num_inputs, pipeline->num_inputs);
  if (ocp_stream_is_recorded(stream))
    return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                    "the session runs on several devices, and a CUDA graph of the whole Run cannot capture that. Each "
                    "stage has CUDA graphs of its own (automatic_cuda_graphs). " OCP_WITHOUT_CAPTURE);
  run r = {.self = pipeline, .inputs = inputs, .output = output, .output_context = output_context};
  r.values = calloc(pipeline->num_values + 1, sizeof *r.values);
  r.copies = calloc((size_t)pipeline->num_values * pipeline->num_devices + 1, sizeof *r.copies);
  r.streams = calloc(pipeline->num_devices, sizeof(ocp_stream *));
  r.sources = calloc((size_t)pipeline->most_sources + 1, sizeof *r.sources);
  if (!r.values || !r.copies || !r.streams || !r.sources) {
    ocp_fail_memory(error);
  } else {
    r.streams[0] = stream;
    run_stages(&r, error);
    free_copies(&r);
  }
  free(r.values);
  free(r.copies);
  free(r.streams);
  free(r.sources);
  return error->code;
}
