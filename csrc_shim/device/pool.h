/* The streams, arenas and sequence numbers of a device; private to this folder.
 *
 * All work of a device is numbered from one sequence. ocp_stream_enqueued gives the latest work of a stream the next
 * number, and a stream knows below which number all its work has finished. Freed memory remembers the number at which
 * it was freed: another stream can get it when every stream that could have used it has finished the work enqueued up
 * to that number, or when the new stream waits for that work on the device. No driver call is needed for that:
 * synchronisations that happen anyway advance the numbers. */
#ifndef OCP_DEVICE_POOL_H
#define OCP_DEVICE_POOL_H

#include <pthread.h>

#include "device/arena_options.h"
#include "device/stream_state.h"

#define OCP_IDLE UINT64_MAX
enum { OCP_MAX_WAITED = 8 };
enum { OCP_TURN_ALONE = 1 << 29, OCP_TURN_WANTED = 1 << 30 };

struct ocp_stream_private {
  ocp_stream *next;      /* in the list of the pool's streams */
  ocp_stream *next_idle; /* in the list of idle streams that can be borrowed */
  uint64_t id;           /* unique: never reused */
  atomic_uint users;     /* references; the last release destroys the stream */
  /* Written under the lock; the thread that enqueues on the stream may read it without the lock. */
  atomic_ullong enqueued;     /* number of the latest work */
  atomic_ullong pending_from; /* all work below this number has finished; OCP_IDLE: all work has */
  /* The latest streams that this stream has waited for: their work up to `position` precedes the later work of
   * this stream. */
  struct {
    uint64_t id, position;
  } waited[OCP_MAX_WAITED];
  unsigned num_waited;
  const void *run; /* the one Run that enqueued all unfinished work; NULL: no Run, or several; guarded by the lock */
  /* Turns: see ocp_stream_take_turn. */
  atomic_uint turns; /* number of shared turns, or OCP_TURN_ALONE; plus OCP_TURN_WANTED if threads wait for a turn */
  pthread_mutex_t turn_lock; /* guards waiting for a turn */
  pthread_cond_t turn_ended;
  unsigned want_alone; /* threads that wait for an exclusive turn */
  bool left_open;      /* true: a capture of the stream could not be ended */
};

typedef struct ocp_arena ocp_arena;     /* arena.h */
typedef struct ocp_mempool ocp_mempool; /* mempool.h */

typedef struct ocp_pool {
  pthread_mutex_t lock; /* guards the members below, and ocp_stream_private; never held during a driver call */
  uint64_t sequence, last_stream_id;
  ocp_stream *streams;
  ocp_stream *idle_streams; /* idle streams that can be borrowed */
  ocp_arena *arenas[OCP_NUM_MEMORIES];
  ocp_mempool *mempool;             /* replaces the device memory's arena if the options ask for that */
  struct ocp_reclaimer *reclaimers; /* memory.h */
  pthread_mutex_t reclaim_lock;     /* held while reclaimers work; taken before `lock` */
  /* Held while code that does not own a stream waits for it or queries it, and while a stream is destroyed. Taken
   * before `lock`. */
  pthread_mutex_t streams_lock;
} ocp_pool;

#endif
