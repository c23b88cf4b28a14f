/* Launches of executable graphs. */
#include "emulator/work/replay.h"

#include <stdlib.h>
#include <string.h>

#include "emulator/work/observe.h"

/* A graph whose nodes a launch runs: the launched graph, or a body of a conditional node. */
typedef struct frame {
  struct frame *outer;  /* of the graph with the conditional node; NULL: this graph was launched */
  const emu_work *work; /* the conditional node; NULL: this graph was launched */
  const struct CUgraphExec_st *exec;
  const emu_snapshot *snapshot;
  uint32_t done; /* number of nodes that have run */
  bool ran[];    /* by node */
} frame;

struct emu_replay {
  emu_context context;
  struct CUgraphExec_st *exec;
  CUresult result;
  uint64_t number;        /* number among the queued launches of the executable graph, from 1; 0: not queued */
  emu_snapshot *snapshot; /* the work of the graph's nodes when it was launched */
  frame *inner;           /* the innermost frame */
};

emu_snapshot *emu_snapshot_make(uint32_t count) {
  emu_snapshot *snapshot = calloc(1, sizeof *snapshot + count * sizeof(emu_work *));
  if (snapshot) {
    atomic_init(&snapshot->references, 1);
    snapshot->count = count;
  }
  return snapshot;
}

void emu_snapshot_release(emu_snapshot *snapshot) {
  if (!snapshot || atomic_fetch_sub(&snapshot->references, 1) != 1)
    return;
  for (uint32_t i = 0; i < snapshot->count; i++)
    emu_work_release(snapshot->works[i]);
  free(snapshot);
}

void emu_graph_exec_release(struct CUgraphExec_st *exec) {
  if (atomic_fetch_sub(&exec->references, 1) != 1)
    return;
  for (uint32_t i = 0; exec->snapshot && i < exec->snapshot->count; i++) {
    const emu_work *work = exec->snapshot->works[i];
    if (work && work->condition)
      atomic_store(&work->condition->is_instantiated, false);
  }
  emu_snapshot_release(exec->snapshot);
  for (uint32_t i = 0; i < exec->count; i++)
    free(exec->nodes[i].before);
  pthread_mutex_destroy(&exec->lock);
  pthread_mutex_destroy(&exec->running);
  free(exec);
}

static frame *make_frame(frame *outer, const emu_work *work, const struct CUgraphExec_st *exec,
                         const emu_snapshot *snapshot) {
  frame *made = calloc(1, sizeof *made + exec->count * sizeof(bool));
  if (made) {
    made->outer = outer;
    made->work = work;
    made->exec = exec;
    made->snapshot = snapshot;
  }
  return made;
}

/* Sets the values of the conditions whose handles have a default, in the graph and in all bodies. */
static void assign_defaults(const emu_snapshot *snapshot) {
  for (uint32_t i = 0; i < snapshot->count; i++) {
    const emu_work *work = snapshot->works[i];
    if (work->condition && work->condition->assigns_default)
      atomic_store(&work->condition->value, work->condition->initial);
    for (uint32_t k = 0; k < work->num_bodies; k++)
      assign_defaults(((const struct CUgraphExec_st *)work->bodies[k])->snapshot);
  }
}

emu_replay *emu_replay_make(CUgraphExec exec, CUstream stream) {
  emu_replay *replay = calloc(1, sizeof *replay);
  if (!replay)
    return NULL;
  replay->exec = exec;
  atomic_fetch_add(&exec->references, 1);
  pthread_mutex_lock(&exec->lock);
  replay->snapshot = exec->snapshot;
  atomic_fetch_add(&replay->snapshot->references, 1);
  pthread_mutex_unlock(&exec->lock);
  replay->context = emu_context_of(stream);
  replay->context.in_graph = true;
  replay->inner = make_frame(NULL, NULL, exec, replay->snapshot);
  if (replay->inner)
    return replay;
  emu_replay_free(replay);
  return NULL;
}

/* Returns the next node in order, or a random one whose dependencies have run. */
static uint32_t pick(const frame *of, uint32_t (*random)(uint32_t below)) {
  if (!random)
    return of->done;
  uint32_t picked = 0, ready = 0;
  for (uint32_t i = 0; i < of->exec->count; i++) {
    bool free_to_run = !of->ran[i];
    for (uint32_t k = 0; k < of->exec->nodes[i].num_before && free_to_run; k++)
      free_to_run = of->ran[of->exec->nodes[i].before[k]];
    if (free_to_run && random(++ready) == 0)
      picked = i;
  }
  return picked;
}

/* Begins a conditional node, unless its condition selects no body. */
static void enter(emu_replay *replay, const emu_work *work) {
  const bool holds = atomic_load(&work->condition->value) != 0;
  if (!holds && (work->repeats || work->num_bodies < 2))
    return;
  const struct CUgraphExec_st *body = work->bodies[holds ? 0 : 1];
  frame *inner = make_frame(replay->inner, work, body, body->snapshot);
  if (inner)
    replay->inner = inner;
  else
    replay->result = CUDA_ERROR_OUT_OF_MEMORY;
}

/* Begins the next iteration of a body that has run, or leaves the body. */
static void finish_body(emu_replay *replay) {
  frame *body = replay->inner;
  if (body->work->repeats && atomic_load(&body->work->condition->value)) {
    body->done = 0;
    memset(body->ran, 0, body->exec->count * sizeof *body->ran);
    return;
  }
  replay->inner = body->outer;
  free(body);
}

bool emu_replay_step(emu_replay *replay, const emu_clock *clock, uint32_t (*random)(uint32_t below)) {
  frame *now = replay->inner;
  if (replay->result || (now->done == now->exec->count && !now->outer))
    return false;
  if (!now->outer && now->done == 0)
    assign_defaults(now->snapshot);
  if (now->done == now->exec->count) {
    finish_body(replay);
    return true;
  }
  uint32_t index = pick(now, random);
  const emu_work *work = now->snapshot->works[index];
  now->ran[index] = true;
  now->done++;
  if (work->condition)
    enter(replay, work);
  for (uint32_t i = 0; i < work->count && !replay->result; i++)
    replay->result = emu_run_observed(&replay->context, work->ops[i], clock);
  return true;
}

CUresult emu_replay_run(emu_replay *replay, const emu_clock *clock) {
  replay->context.is_inline = true;
  pthread_mutex_lock(&replay->exec->running);
  while (emu_replay_step(replay, clock, NULL)) {
  }
  pthread_mutex_unlock(&replay->exec->running);
  atomic_fetch_sub(&replay->exec->num_inline, 1);
  return replay->result;
}

void emu_replay_queued(emu_replay *replay) { replay->number = ++replay->exec->num_queued; }

bool emu_replay_is_next(const emu_replay *replay) { return replay->number == replay->exec->num_finished + 1; }

bool emu_replay_begin_inline(emu_replay *replay) {
  if (replay->exec->num_queued != replay->exec->num_finished)
    return false;
  atomic_fetch_add(&replay->exec->num_inline, 1);
  return true;
}

bool emu_replay_is_inline(const emu_replay *replay) { return atomic_load(&replay->exec->num_inline) > 0; }

CUresult emu_replay_result(const emu_replay *replay) { return replay->result; }

void emu_replay_free(emu_replay *replay) {
  if (replay->number)
    replay->exec->num_finished++;
  for (frame *each = replay->inner, *outer; each; each = outer) {
    outer = each->outer;
    free(each);
  }
  emu_snapshot_release(replay->snapshot);
  emu_graph_exec_release(replay->exec);
  free(replay);
}
