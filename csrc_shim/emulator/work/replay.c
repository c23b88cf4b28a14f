/* Launches of executable graphs. */
#include "emulator/work/replay.h"

#include <stdlib.h>

#include "emulator/work/observe.h"

struct emu_replay {
  emu_context context;
  struct CUgraphExec_st *exec;
  CUresult result;
  uint32_t done;
  uint64_t number;        /* number among the queued launches of the executable graph, from 1; 0: not queued */
  emu_snapshot *snapshot; /* the work of the graph's nodes when it was launched */
  bool ran[];
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
  emu_snapshot_release(exec->snapshot);
  for (uint32_t i = 0; i < exec->count; i++)
    free(exec->nodes[i].before);
  pthread_mutex_destroy(&exec->lock);
  pthread_mutex_destroy(&exec->running);
  free(exec);
}

emu_replay *emu_replay_make(CUgraphExec exec, CUstream stream) {
  emu_replay *replay = calloc(1, sizeof *replay + exec->count * sizeof(bool));
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
  return replay;
}

/* Returns the next node in order, or a random one whose dependencies have run. */
static uint32_t pick(const emu_replay *replay, uint32_t (*random)(uint32_t below)) {
  if (!random)
    return replay->done;
  uint32_t picked = 0, ready = 0;
  for (uint32_t i = 0; i < replay->exec->count; i++) {
    bool free_to_run = !replay->ran[i];
    for (uint32_t k = 0; k < replay->exec->nodes[i].num_before && free_to_run; k++)
      free_to_run = replay->ran[replay->exec->nodes[i].before[k]];
    if (free_to_run && random(++ready) == 0)
      picked = i;
  }
  return picked;
}

bool emu_replay_step(emu_replay *replay, const emu_clock *clock, uint32_t (*random)(uint32_t below)) {
  if (replay->done == replay->exec->count || replay->result)
    return false;
  uint32_t index = pick(replay, random);
  const emu_work *work = replay->snapshot->works[index];
  for (uint32_t i = 0; i < work->count && !replay->result; i++)
    replay->result = emu_run_observed(&replay->context, work->ops[i], clock);
  replay->ran[index] = true;
  replay->done++;
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
  emu_snapshot_release(replay->snapshot);
  emu_graph_exec_release(replay->exec);
  free(replay);
}
