/* The streams, arenas and sequence numbers of a device. Private to csrc_shim/device, except that other folders read a
 * stream's id.
 *
 * All work of a device is numbered in one sequence. ocp_stream_enqueued gives the latest work of a stream the next
 * number. Each stream stores the number below which all its work has finished, and freed memory stores the number of
 * the newest work when it was freed. Another stream can get the memory when every stream that could have used it has
 * finished its work up to that number, or when the other stream waits for that work on the device. The synchronizations
 * that Runs need anyway update the numbers. The driver is asked in addition (ocp_pool_poll) before new memory is
 * allocated from it. */
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
  /* Threads write the next two members under the pool's lock; the thread that enqueues on the stream may read them
   * without the lock. */
  atomic_ullong enqueued;     /* number of the latest work */
  atomic_ullong pending_from; /* all work below this number has finished; OCP_IDLE: all work has */
  /* The latest streams that this stream has waited for: their work up to `position` precedes the later work of
   * this stream. */
  struct {
    uint64_t id, position;
  } waited[OCP_MAX_WAITED];
  unsigned num_waited;
  const void *run; /* identifies the thread whose current Run enqueued all unfinished work; NULL: no single Run that
                        is in progress did */
  /* Turns, which are a readers-writer lock of the stream: see ocp_stream_take_turn. */
  atomic_uint turns; /* number of shared turns, or OCP_TURN_ALONE; plus OCP_TURN_WANTED if threads wait for a turn */
  pthread_mutex_t turn_lock; /* guards waiting for a turn */
  pthread_cond_t turn_ended;
  unsigned want_alone; /* number of threads that wait for an exclusive turn */
  bool left_open;      /* true: a capture of the stream could not be ended */
};

typedef struct ocp_arena ocp_arena;     /* arena.h */
typedef struct ocp_mempool ocp_mempool; /* mempool.h */
typedef struct ocp_retired ocp_retired; /* retired.h */

typedef struct ocp_pool {
  pthread_mutex_t lock; /* guards the members below, and ocp_stream_private; never held during a driver call */
  uint64_t sequence, last_stream_id;
  ocp_stream *streams;
  ocp_stream *idle_streams; /* linked by next_idle; ocp_stream_borrow takes one */
  ocp_arena *arenas[OCP_NUM_MEMORIES];
  atomic_int fill;                  /* see ocp_device_fill_new_memory; -1: device memory is not filled */
  ocp_mempool *mempool;             /* replaces the device memory's arena if the options ask for that */
  struct ocp_reclaimer *reclaimers; /* memory.h */
  ocp_retired *retired;             /* resources to release after the work that uses them */
  pthread_mutex_t reclaim_lock;     /* held while reclaimers work; taken before `lock` */
  /* Held while a thread waits for or queries streams that it found in `streams`, so that none of them is destroyed
   * meanwhile, and while a stream is destroyed. Taken before `lock`. */
  pthread_mutex_t streams_lock;
} ocp_pool;

#endif
