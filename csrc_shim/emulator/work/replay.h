/* Executable graphs, and their launches ("replays"), which streams run node by node. */
#ifndef OCP_EMULATOR_WORK_REPLAY_H
#define OCP_EMULATOR_WORK_REPLAY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/work/graph.h"

/* The work of all nodes, copy-on-write: a launch keeps the snapshot that was current when it was enqueued, and a
 * snapshot with several users does not change. */
typedef struct emu_snapshot {
  atomic_int references;
  uint32_t count;
  emu_work *works[];
} emu_snapshot;

struct CUgraphExec_st {
  atomic_int references; /* of the application and of each emu_replay */
  pthread_mutex_t lock;  /* guards the snapshot */
  uint64_t identity;     /* unique number of the graph from which it was made */
  emu_device *device;
  pthread_mutex_t running;           /* held while a launch runs inline */
  atomic_uint num_inline;            /* launches that run inline, or are about to */
  uint64_t num_queued, num_finished; /* launches queued, and queued ones that have run; guarded by emu_order */
  emu_snapshot *snapshot;
  uint32_t count;
  struct {
    uint32_t num_before;
    uint32_t *before;
  } nodes[];
};

emu_snapshot *emu_snapshot_make(uint32_t count);
void emu_snapshot_release(emu_snapshot *snapshot);
void emu_graph_exec_release(struct CUgraphExec_st *exec);

/* ---- a launch ---- */
typedef struct emu_replay emu_replay;
/* Makes a launch of the graph in its present state. Its operations report their times to the profile events that are
 * open on the calling thread. Returns NULL if host memory is exhausted. */
emu_replay *emu_replay_make(CUgraphExec exec, CUstream stream);
/* Runs one node whose dependencies have run: the next one, or one picked by `random` (may be NULL). Returns false if no
 * node is left, or if a node failed. */
bool emu_replay_step(emu_replay *replay, const emu_clock *clock, uint32_t (*random)(uint32_t below));
/* Runs the whole launch at once, after emu_replay_begin_inline. The launches of an executable graph run one at a time,
 * in order. */
CUresult emu_replay_run(emu_replay *replay, const emu_clock *clock);
/* For deferred launches; called with emu_order held. emu_replay_queued numbers a launch that was queued;
 * emu_replay_is_next tells whether all earlier launches of the graph have run. */
void emu_replay_queued(emu_replay *replay);
bool emu_replay_is_next(const emu_replay *replay);
/* Marks the graph as running inline until emu_replay_run returns, unless a launch of it is queued; then returns false.
 * Called with emu_order held. Queued launches of the graph must not run while emu_replay_is_inline. */
bool emu_replay_begin_inline(emu_replay *replay);
bool emu_replay_is_inline(const emu_replay *replay);
CUresult emu_replay_result(const emu_replay *replay);
void emu_replay_free(emu_replay *replay);

#endif
