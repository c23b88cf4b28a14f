#include "run/instance/replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/counters.h"
#include "base/host.h"
#include "device/memory/memory.h"
#include "device/release.h"
#include "driver/activity.h"
#include "driver/driver.h"
#include "driver/error.h"
#include "plan/format.h"
#include "plan/load.h"
#include "run/instance/calls.h"
#include "run/instance/graph_nodes.h"

/* Minimum number of nodes of a graph. Launching fewer kernels one by one costs no more. */
enum { MIN_NODES = 2 };

/* The slabs of all graphs of a cluster together take at most 1 / MEMORY_SHARE of the device's memory. Only the slab of
 * a cluster's only graph may take more. */
enum { MEMORY_SHARE = 4 };

/* Properties of a node. A graph serves another instance only if `kind` and `skipped` are equal; an update of
 * the graph sets the other properties. */
typedef struct node_state {
  uint32_t kind;
  bool skipped; /* true: the record has no node */
  unsigned grid[3], shared_bytes;
} node_state;

struct ocp_replay {
  ocp_replay_budget *budget;
  const ocp_variant *variant;
  CUgraph graph; /* kept, since updates of the executable graph refer to its nodes */
  CUgraphExec exec;
  uint64_t slab, slab_bytes;
  ocp_record_counts counts;          /* of the nodes outside of loops, by kind of record */
  CUgraphNode *nodes;                /* the node of each record */
  struct ocp_prepared **used;        /* algorithms of the records that are library calls */
  uint64_t *values;                  /* parameter values in the executable graph */
  node_state *states;                /* state of each record's node in the executable graph */
  bool *changed;                     /* records whose nodes must be updated: scratch of a Run */
  uint32_t *records;                 /* the record of each fixup */
  ocp_graph_sources sources;         /* sources of the nodes, for profiles */
  uint64_t *bases;                   /* addresses of inputs and outputs in the executable graph */
  CUgraphConditionalHandle *handles; /* per record: the handle of a loop's condition */
  bool *in_loop;                     /* loops, and the records that they repeat: their nodes cannot change */
};

static void fall_back(ocp_counter reason) {
  ocp_count(OCP_GRAPH_FALLBACKS, 1);
  ocp_count(reason, 1);
}

/* Refuses a graph for this and all later Runs of the instance; the first refusal of a cluster goes to the log. */
static void refuse(ocp_replay_budget *budget, ocp_instance *instance, ocp_counter reason, const ocp_error *error) {
  char text[1200];
  instance->replay_refused = reason;
  if (atomic_exchange(&budget->said_refusal, true))
    return;
  snprintf(text, sizeof text, "%.100s runs without a CUDA graph: %.1000s", budget->cluster_name, error->text);
  ocp_log(ORT_LOGGING_LEVEL_WARNING, text, OCP_EP_NAME);
}

static uint32_t num_bases(const ocp_instance *instance) {
  return instance->variant->plan->header.num_inputs + instance->variant->plan->header.num_outputs;
}

bool ocp_replay_is_due(const ocp_replay_budget *budget, ocp_instance *instance, const ocp_stream *stream) {
  if (atomic_load_explicit(&budget->max_replays, memory_order_relaxed) == 0)
    return false;
  if (!instance->replay) {
    if (instance->warm_runs < atomic_load_explicit(&budget->warm_runs, memory_order_relaxed)
                                  << instance->replay_evictions) {
      instance->warm_runs++;
      return false;
    }
    uint32_t nodes = 0;
    for (uint32_t i = 0; i < instance->variant->plan->header.num_records && nodes < MIN_NODES; i++)
      nodes += !instance->calls[i].skipped;
    if (nodes < MIN_NODES)
      return false;
  }
  ocp_counter reason = instance->replay_refused;
  if (instance->variant->plan->header.num_segments > 1)
    reason = OCP_GRAPH_FALLBACKS_READ_BACK;
  else if (instance->variant->plan->has_calls)
    reason = OCP_GRAPH_FALLBACKS_CALL;
  else if (ocp_stream_is_recorded(stream))
    reason = OCP_GRAPH_FALLBACKS_CAPTURING;
  if (reason)
    fall_back(reason);
  return !reason;
}

/* ---- making ---- */

static void give_place(ocp_replay_budget *budget, uint64_t slab_bytes) {
  atomic_fetch_sub(&budget->num_replays, 1);
  atomic_fetch_sub(&budget->slab_bytes, slab_bytes);
}

void ocp_replay_release(ocp_replay *replay) {
  if (!replay)
    return;
  ocp_device *device = replay->budget->device;
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (stay.entered) {
    if (replay->exec)
      ocp_device_released(device, device->driver->GraphExecDestroy(replay->exec), "cuGraphExecDestroy");
    if (replay->graph)
      ocp_device_released(device, device->driver->GraphDestroy(replay->graph), "cuGraphDestroy");
    if (replay->slab)
      ocp_device_free(device, replay->slab, NULL); /* the stream of an unfinished launch may have been destroyed */
  }
  for (uint32_t i = 0; i < replay->variant->plan->header.num_records; i++)
    ocp_graph_node_release(replay->variant, i, replay->used[i]);
  give_place(replay->budget, replay->slab_bytes);
  ocp_count(OCP_GRAPHS_LIVE, -1);
  ocp_graph_sources_clear(&replay->sources);
  free(replay);
}

static bool try_place(ocp_replay_budget *budget, uint64_t slab_bytes) {
  const unsigned graphs = atomic_fetch_add(&budget->num_replays, 1);
  const uint64_t held = atomic_fetch_add(&budget->slab_bytes, slab_bytes);
  if (graphs < atomic_load_explicit(&budget->max_replays, memory_order_relaxed) &&
      (held == 0 || held + slab_bytes <= budget->device->total_bytes / MEMORY_SHARE))
    return true;
  give_place(budget, slab_bytes);
  return false;
}

/* Takes a slot for a graph from the cluster's budget, if necessary by releasing the least recently used graphs. */
static bool take_place(ocp_replay_budget *budget, uint64_t slab_bytes) {
  while (!try_place(budget, slab_bytes)) {
    ocp_replay *oldest = ocp_instance_cache_take_replay(budget->cache);
    if (!oldest)
      return false;
    ocp_replay_release(oldest);
  }
  return true;
}

/* Allocates an ocp_replay with its arrays and without a CUDA graph, after take_place. */
static ocp_replay *allocate(ocp_replay_budget *budget, const ocp_instance *instance, ocp_error *error) {
  const ocp_plan_header *h = &instance->variant->plan->header;
  const uint32_t num_records = h->num_records, num_fixups = h->num_params; /* maximum numbers */
  ocp_replay *replay =
      calloc(1, sizeof *replay + num_bases(instance) * sizeof *replay->bases +
                    num_records * (sizeof *replay->nodes + sizeof *replay->used + sizeof *replay->states +
                                   sizeof *replay->changed + sizeof *replay->handles + sizeof *replay->in_loop) +
                    h->num_params * (sizeof *replay->values + sizeof *replay->records));
  if (!replay) {
    give_place(budget, instance->slab_bytes[0]);
    ocp_fail_memory(error);
    return NULL;
  }
  replay->budget = budget;
  replay->variant = instance->variant;
  replay->slab_bytes = instance->slab_bytes[0];
  replay->nodes = (CUgraphNode *)(replay + 1);
  replay->used = (struct ocp_prepared **)(replay->nodes + num_records);
  replay->bases = (uint64_t *)(replay->used + num_records);
  replay->handles = (CUgraphConditionalHandle *)(replay->bases + num_bases(instance));
  replay->values = (uint64_t *)(replay->handles + num_records);
  replay->states = (node_state *)(replay->values + h->num_params);
  replay->records = (uint32_t *)(replay->states + num_records);
  replay->changed = (bool *)(replay->records + num_fixups);
  replay->in_loop = replay->changed + num_records;
  ocp_count(OCP_GRAPHS_LIVE, 1);
  return replay;
}

/* Finds the record of each fixup. Records and fixups are both in the order of the parameters. */
static void find_records(const ocp_instance *instance, ocp_replay *replay) {
  const ocp_plan_record *records = instance->variant->plan->records;
  for (uint32_t i = 0, record = 0; i < instance->num_fixups[0]; i++) {
    while (instance->fixups[i].value >= records[record].first_param + records[record].num_params)
      record++;
    replay->records[i] = record;
  }
}

static node_state state_of(const ocp_instance *instance, uint32_t index) {
  const ocp_call *call = &instance->calls[index];
  return (node_state){.kind = call->kind,
                      .skipped = call->skipped,
                      .grid = {call->grid[0], call->grid[1], call->grid[2]},
                      .shared_bytes = call->shared_bytes};
}

/* Notes in `replay` that the graph's node of plan record `index` has the instance's present parameters. */
static void note_node(const ocp_instance *instance, uint32_t index, ocp_replay *replay) {
  const ocp_plan_record *record = &instance->variant->plan->records[index];
  replay->states[index] = state_of(instance, index);
  memcpy(replay->values + record->first_param, instance->calls[index].values,
         record->num_params * sizeof *replay->values);
}

/* Creates the condition handles of the loops among `records`, without those of inner loops. */
static CUresult create_handles(const ocp_instance *instance, ocp_replay *replay, CUgraph graph, ocp_range records) {
  const ocp_device *device = instance->variant->device;
  CUresult result = CUDA_SUCCESS;
  for (uint32_t i = records.first; i < records.first + records.count && result == CUDA_SUCCESS; i++) {
    const ocp_plan_record *record = &instance->variant->plan->records[i];
    if (record->kind != OCP_RECORD_LOOP)
      continue;
    result = device->driver->GraphConditionalHandleCreate(&replay->handles[i], graph, device->context, 0,
                                                          CU_GRAPH_COND_ASSIGN_DEFAULT);
    i += record->index;
  }
  return result;
}

/* Sets those parameters of a launch that are conditions of loops: to the handles in the graph of `replay`, or to 0 if
 * `replay` is NULL. */
static void set_handles(const ocp_instance *instance, uint32_t index, const ocp_replay *replay) {
  const ocp_plan *plan = instance->variant->plan;
  const ocp_plan_record *record = &plan->records[index];
  for (uint32_t i = 0; plan->has_loops && record->kind == OCP_RECORD_LAUNCH && i < record->num_params; i++) {
    const ocp_plan_param *param = &plan->params[record->first_param + i];
    if (param->kind == OCP_PARAM_CONDITION)
      instance->calls[index].values[i] = replay ? replay->handles[param->imm] : 0;
  }
}

typedef struct filling {
  const ocp_instance *instance;
  ocp_replay *replay;
  ocp_stream *stream;
  uint32_t *record; /* the record whose node is being added */
  ocp_error *error;
} filling;

/* Adds the nodes of the records to a graph. For a loop, adds a WHILE node, and calls itself for the records that the
 * loop repeats: their nodes belong to the body graph of the WHILE node. The plan's checks bound the depth of the
 * recursion. */
static CUresult fill_graph(const filling *f, CUgraph graph, ocp_range records, bool in_loop) {
  const ocp_instance *instance = f->instance;
  ocp_replay *replay = f->replay;
  CUresult result = create_handles(instance, replay, graph, records);
  /* Two chains of nodes: uploads, and all others. `awaited`: the node of the upload that the next node of the other
   * chain depends on; NULL: it depends on no upload. */
  CUgraphNode last = NULL, uploaded = NULL, awaited = NULL;
  for (uint32_t i = records.first; i < records.first + records.count && result == CUDA_SUCCESS; i++) {
    const ocp_call *call = &instance->calls[i];
    const uint32_t index = instance->variant->plan->records[i].index;
    const bool is_loop = call->kind == OCP_RECORD_LOOP, is_upload = call->kind == OCP_RECORD_UPLOAD;
    *f->record = i;
    note_node(instance, i, replay);
    replay->in_loop[i] = in_loop || is_loop;
    if (call->kind == OCP_RECORD_AWAIT)
      awaited = replay->nodes[index];
    if (call->skipped || call->kind == OCP_RECORD_AWAIT)
      continue;
    const ocp_graph_before before = {{last, is_upload ? uploaded : awaited}};
    if (is_loop) {
      CUgraph body = NULL;
      result =
          ocp_graph_loop_add(instance->variant->device, replay->handles[i], graph, before, &replay->nodes[i], &body);
      if (result == CUDA_SUCCESS)
        result = fill_graph(f, body, (ocp_range){i + 1, index}, true);
    } else {
      set_handles(instance, i, replay);
      result = ocp_graph_node_add(instance, i, f->stream, graph, before, &replay->nodes[i], &replay->used[i], f->error);
      set_handles(instance, i, NULL);
    }
    if (result != CUDA_SUCCESS)
      break;
    if (is_upload) {
      uploaded = replay->nodes[i];
      replay->counts.uploaded_bytes += (int64_t)call->values[2];
    } else {
      last = replay->nodes[i];
      awaited = NULL;
    }
    replay->counts.records[call->kind] += !in_loop; /* the host does not know how often a loop repeats */
    if (is_loop)
      i += index;
  }
  return result;
}

static CUresult fill(const filling *f) {
  const ocp_driver *driver = f->instance->variant->device->driver;
  ocp_replay *replay = f->replay;
  CUresult result = driver->GraphCreate(&replay->graph, 0);
  if (result == CUDA_SUCCESS)
    result = fill_graph(f, replay->graph, f->instance->variant->plan->views[0].records, false);
  if (result != CUDA_SUCCESS)
    return result;
  *f->record = f->instance->variant->plan->header.num_records;
  return driver->GraphInstantiate(&replay->exec, replay->graph, 0);
}

/* Builds the instance's graph with the present addresses; if that fails, counts the reason. */
static bool make(ocp_replay_budget *budget, ocp_instance *instance, ocp_stream *stream) {
  const ocp_plan *plan = instance->variant->plan;
  ocp_error error = {0};
  if (!take_place(budget, instance->slab_bytes[0])) {
    fall_back(OCP_GRAPH_FALLBACKS_CACHE_FULL);
    return false;
  }
  ocp_replay *replay = allocate(budget, instance, &error);
  if (!replay || (instance->slab_bytes[0] &&
                  ocp_device_alloc(budget->device, instance->slab_bytes[0], stream, &replay->slab, &error) != ORT_OK)) {
    ocp_replay_release(replay);
    ocp_instance_cool(instance);
    fall_back(OCP_GRAPH_FALLBACKS_MEMORY);
    return false;
  }
  instance->bases[num_bases(instance)] = replay->slab;
  ocp_instance_set_pointers(instance, 0);
  instance->bases[num_bases(instance)] = 0; /* the graph has its own slab */
  memcpy(replay->bases, instance->bases, num_bases(instance) * sizeof *replay->bases);
  find_records(instance, replay);
  instance->inherited = false;
  uint32_t record = 0;
  ocp_activity_begin_graph();
  const filling filled = {instance, replay, stream, &record, &error};
  const CUresult result = fill(&filled);
  ocp_activity_end_graph(&replay->sources);
  if (result == CUDA_SUCCESS) {
    instance->replay = replay;
    instance->release_replay = ocp_replay_release;
    ocp_count(OCP_GRAPH_CAPTURES, 1);
    return true;
  }
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    ocp_replay_release(replay);
    ocp_instance_cool(instance);
    fall_back(OCP_GRAPH_FALLBACKS_MEMORY);
    return false;
  }
  const bool in_library = record < plan->header.num_records && plan->records[record].kind == OCP_RECORD_LIBRARY;
  if (error.code == ORT_OK)
    ocp_fail_cuda(&error, budget->device->driver, result, "making a CUDA graph");
  const ocp_counter reason = in_library ? OCP_GRAPH_FALLBACKS_LIBRARY : OCP_GRAPH_FALLBACKS_DRIVER;
  refuse(budget, instance, reason, &error);
  fall_back(reason);
  ocp_replay_release(replay);
  return false;
}

/* ---- running ---- */

typedef enum outcome { READY, COLD, STALE, FAILED } outcome;

/* Sets the addresses in the instance's parameters, and marks the records whose addresses differ from the graph's. */
static void find_changes(ocp_instance *instance) {
  ocp_replay *replay = instance->replay;
  const uint32_t count = instance->num_fixups[0];
  memset(replay->changed, 0, instance->variant->plan->header.num_records * sizeof *replay->changed);
  for (uint32_t i = 0; i < count; i++) {
    /* Sets even unchanged addresses: a Run without the graph may have left other addresses in the parameters. */
    const ocp_fixup *fixup = &instance->fixups[i];
    const bool in_slab = fixup->base >= num_bases(instance);
    instance->values[fixup->value] = (in_slab ? replay->slab : instance->bases[fixup->base]) + fixup->offset;
    replay->changed[replay->records[i]] |= !in_slab && replay->bases[fixup->base] != instance->bases[fixup->base];
  }
}

static bool change_node(const ocp_instance *instance, uint32_t index, ocp_replay *replay, ocp_stream *stream) {
  set_handles(instance, index, replay);
  const CUresult result =
      ocp_graph_node_change(instance, index, stream, replay->exec, replay->nodes[index], &replay->used[index]);
  set_handles(instance, index, NULL);
  if (result != CUDA_SUCCESS)
    return false;
  note_node(instance, index, replay);
  return true;
}

/* Gives the graph a slab of at least slab_bytes[0]; a new slab is a quarter larger, for later instances. False if
 * memory, or the cluster's share of the memory, does not suffice. */
static bool fit_slab(ocp_replay *replay, const ocp_instance *instance, ocp_stream *stream) {
  const uint64_t needed = instance->slab_bytes[0], bytes = needed + needed / 4, held = replay->slab_bytes;
  ocp_replay_budget *budget = replay->budget;
  ocp_error ignored = {0};
  uint64_t slab;
  if (needed <= held)
    return true;
  if (atomic_load(&budget->num_replays) > 1 &&
      atomic_load(&budget->slab_bytes) + bytes - held > budget->device->total_bytes / MEMORY_SHARE)
    return false;
  if (ocp_device_alloc(budget->device, bytes, stream, &slab, &ignored) != ORT_OK)
    return false;
  if (replay->slab)
    ocp_device_free(budget->device, replay->slab, NULL);
  atomic_fetch_add(&budget->slab_bytes, bytes - held);
  replay->slab = slab;
  replay->slab_bytes = bytes;
  return true;
}

/* Marks the records whose nodes must be updated in a graph that was built for another instance; false if the graph
 * would need other nodes or its slab cannot grow. */
static bool find_differences(ocp_instance *instance, ocp_stream *stream) {
  ocp_replay *replay = instance->replay;
  const ocp_plan *plan = instance->variant->plan;
  for (uint32_t i = 0; i < plan->header.num_records; i++)
    if (replay->states[i].kind != instance->calls[i].kind || replay->states[i].skipped != instance->calls[i].skipped)
      return false;
  if (!fit_slab(replay, instance, stream))
    return false;
  find_records(instance, replay);
  instance->bases[num_bases(instance)] = replay->slab;
  ocp_instance_set_pointers(instance, 0);
  instance->bases[num_bases(instance)] = 0;
  for (uint32_t i = 0; i < plan->header.num_records; i++) {
    const ocp_plan_record *record = &plan->records[i];
    const node_state state = state_of(instance, i);
    /* A WHILE node depends on the address of its condition, not on the number of iterations. */
    const uint32_t num_params = record->kind == OCP_RECORD_LOOP ? 1 : record->num_params;
    replay->changed[i] = !state.skipped &&
                         (memcmp(state.grid, replay->states[i].grid, sizeof state.grid) != 0 ||
                          state.shared_bytes != replay->states[i].shared_bytes ||
                          memcmp(instance->calls[i].values, replay->values + record->first_param, num_params * 8) != 0);
  }
  return true;
}

/* Updates the nodes of changed records. Returns COLD, without any update, if a changed library call has never run with
 * the stream's library handle; STALE if a node in a WHILE node would have to change, which needs a new graph; FAILED if
 * the graph would need other nodes, or if its slab or one of its nodes cannot be updated. */
static outcome update(ocp_instance *instance, ocp_stream *stream) {
  ocp_replay *replay = instance->replay;
  const ocp_plan *plan = instance->variant->plan;
  const size_t bytes = num_bases(instance) * sizeof *replay->bases;
  if (!instance->inherited && memcmp(replay->bases, instance->bases, bytes) == 0)
    return READY;
  if (!instance->inherited)
    find_changes(instance);
  else if (!find_differences(instance, stream))
    return FAILED;
  for (uint32_t i = 0; i < plan->header.num_records; i++)
    if (replay->changed[i] && plan->records[i].kind == OCP_RECORD_LIBRARY &&
        !ocp_graph_call_is_warm(instance, i, stream))
      return COLD;
  for (uint32_t i = 0; i < plan->header.num_records; i++)
    if (replay->changed[i] && replay->in_loop[i])
      return STALE;
  for (uint32_t i = 0; i < plan->header.num_records; i++)
    if (replay->changed[i] && !change_node(instance, i, replay, stream))
      return FAILED;
  memcpy(replay->bases, instance->bases, bytes);
  instance->inherited = false;
  return READY;
}

/* Whether every library call of the instance has run with the stream's library handle and the present addresses. */
static bool are_all_warm(ocp_instance *instance, ocp_stream *stream) {
  const ocp_plan *plan = instance->variant->plan;
  bool warm = true, pointers = false;
  for (uint32_t i = 0; i < plan->header.num_records && warm; i++)
    if (plan->records[i].kind == OCP_RECORD_LIBRARY && !instance->calls[i].skipped) {
      if (!pointers)
        ocp_instance_set_pointers(instance, 0);
      pointers = true;
      warm = ocp_graph_call_is_warm(instance, i, stream);
    }
  return warm;
}

int ocp_replay_run(ocp_replay_budget *budget, ocp_instance *instance, ocp_stream *stream, bool *launched,
                   ocp_error *error) {
  *launched = false;
  const outcome updated = instance->replay ? update(instance, stream) : READY;
  if (updated == COLD)
    return ORT_OK;
  if (updated == STALE) {
    ocp_replay_release(instance->replay);
    instance->replay = NULL;
  }
  if (updated == FAILED) {
    const bool first = instance->replay_evictions == 0;
    ocp_replay_release(instance->replay);
    instance->replay = NULL;
    ocp_instance_cool(instance);
    if (!first) { /* the next update would fail as well: make no new graph now */
      fall_back(OCP_GRAPH_FALLBACKS_DRIVER);
      return ORT_OK;
    }
  }
  if (!instance->replay && (!are_all_warm(instance, stream) || !make(budget, instance, stream)))
    return ORT_OK;
  *launched = true;
  const ocp_device *device = budget->device;
  const bool named = ocp_is_anybody_listening();
  if (named)
    ocp_activity_of_graph(&instance->replay->sources);
  const CUresult result = device->driver->GraphLaunch(instance->replay->exec, stream->handle);
  if (named)
    ocp_activity_of(0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) { /* the first launch allocates memory in the driver */
    ocp_replay_release(instance->replay);
    instance->replay = NULL;
    ocp_instance_cool(instance);
    fall_back(OCP_GRAPH_FALLBACKS_MEMORY);
    *launched = false;
    return ORT_OK;
  }
  if (result == CUDA_ERROR_NOT_SUPPORTED) {
    ocp_error refused = {0};
    ocp_fail_cuda(&refused, device->driver, result, "cuGraphLaunch");
    refuse(budget, instance, OCP_GRAPH_FALLBACKS_DRIVER, &refused);
    fall_back(OCP_GRAPH_FALLBACKS_DRIVER);
    ocp_replay_release(instance->replay);
    instance->replay = NULL;
    *launched = false;
    return ORT_OK;
  }
  if (result != CUDA_SUCCESS) {
    char what[300];
    snprintf(what, sizeof what, "%.200s: cuGraphLaunch", budget->cluster_name);
    return ocp_device_fail(budget->device, result, what, error);
  }
  ocp_count(OCP_GRAPH_REPLAYS, 1);
  ocp_count_records(&instance->replay->counts);
  return ORT_OK;
}
