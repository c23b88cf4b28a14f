/* The order of a device's streams and the memory that comes and goes between them; private to device.c, memory.c,
 * mempool.c and stream.c.
 *
 * All work of a device is numbered from one sequence. ocp_stream_enqueued gives the end of a stream the next number,
 * and a stream knows below which number all its work has finished. Freed memory remembers the number at which it was
 * freed: another stream may have it when every stream that could have used it has finished what it was doing then, or
 * was waited for on the device. No driver call is needed to find that out; synchronisations that happen anyhow advance
 * the numbers. */
#ifndef OCP_DEVICE_POOL_H
#define OCP_DEVICE_POOL_H

#include <pthread.h>

#include "device/arena_config.h"
#include "device/memory.h"

#define OCP_IDLE UINT64_MAX
enum { OCP_MAX_WAITED = 8 };

struct ocp_stream_private {
  ocp_stream *next;      /* of the pool's streams */
  ocp_stream *next_idle; /* of those to borrow */
  uint64_t id;           /* never used twice */
  atomic_uint users;     /* the last one to release it ends it */
  /* Written under the lock; may be read without it by who enqueues on the stream. */
  atomic_ullong enqueued;     /* number of the latest work */
  atomic_ullong pending_from; /* all work below this number has finished; OCP_IDLE: all work has */
  /* Streams whose work up to a number comes before all later work of this one; the latest few. */
  struct {
    uint64_t id, position;
  } waited[OCP_MAX_WAITED];
  unsigned num_waited;
  const void *run; /* whose thread enqueued all unfinished work in one Run; NULL: nobody, or several. Under the lock. */
  /* Turns, see ocp_stream_take_turn. */
  pthread_mutex_t turn_lock;
  pthread_cond_t turn_ended;
  unsigned sharing, want_alone;
  bool alone;
  bool left_open; /* a capture that could not be ended */
};

typedef struct ocp_arena ocp_arena;     /* arena.h */
typedef struct ocp_mempool ocp_mempool; /* mempool.h */

typedef struct ocp_pool {
  pthread_mutex_t lock; /* guards all below, and ocp_stream_private; never held in a driver call */
  uint64_t sequence, last_stream_id;
  ocp_stream *streams;
  ocp_stream *idle_streams; /* to borrow */
  ocp_arena *arenas[OCP_NUM_MEMORIES];
  ocp_mempool *mempool; /* of device memory, where the options ask for it */
  ocp_reclaimer *reclaimers;
  pthread_mutex_t reclaim_lock; /* held while reclaimers work; taken before lock */
  /* Held where somebody other than its owner waits for or queries a stream, and where a stream is destroyed. Taken
   * before lock. */
  pthread_mutex_t streams_lock;
} ocp_pool;

/* An allocation of that many bytes. */
static inline void ocp_memory_stats_take(ocp_memory_stats *stats, size_t size) {
  const int64_t bytes = (int64_t)size;
  stats->num_allocs++;
  stats->in_use += bytes;
  if (stats->in_use > stats->max_in_use)
    stats->max_in_use = stats->in_use;
  if (bytes > stats->max_alloc_size)
    stats->max_alloc_size = bytes;
}

ocp_pool *ocp_pool_create(void);
/* On a small device regions stay small, so that what lies in one keeps little from being given back. */
void ocp_pool_set_device_bytes(ocp_pool *pool, size_t total_bytes);
void ocp_pool_destroy(ocp_pool *pool); /* of a pool that was never used */
/* The arena's options from now on; a lower limit takes nothing back. */
void ocp_pool_configure(ocp_device *device, int memory, const ocp_arena_config *config);

/* The two kinds of memory behind the functions of memory.h. free returns false for an address that is not handed out.
 * A known stream may be named, as in ocp_device_free. */
int ocp_pool_alloc(ocp_device *device, int memory, size_t bytes, ocp_stream *stream, uint64_t *address,
                   ocp_error *error);
bool ocp_pool_free(ocp_device *device, int memory, uint64_t address, ocp_stream *stream);
/* Memory of its own, past the arena: for what lives long. */
int ocp_pool_reserve(ocp_device *device, int memory, size_t bytes, uint64_t *address, ocp_error *error);
/* Gives what is unused back to the driver; the bytes. `keep`: a mempool keeps what its options say. */
int64_t ocp_pool_shrink(ocp_device *device, int memory, bool keep);
void ocp_pool_stats(ocp_device *device, int memory, ocp_memory_stats *stats);
/* The end of a Run: chunks whose work has finished are bound to no stream any more. */
void ocp_pool_run_ended(ocp_device *device);

/* Under lock: work was enqueued on the stream. */
void ocp_pool_advance(ocp_pool *pool, ocp_stream *stream);
/* Under lock: whether what `taker` enqueues from now on (NULL: anybody, at once) comes after all work up to a number of
 * the stream with that id (0: of all streams). */
bool ocp_pool_is_finished(const ocp_pool *pool, uint64_t stream_id, uint64_t up_to, const ocp_stream *taker);

/* The number of the stream's latest work; that all work up to a number has finished, of the stream with that id if it
 * still exists; whether the stream is known to have none left. */
uint64_t ocp_stream_position(const ocp_stream *stream);
void ocp_stream_completed(ocp_device *device, uint64_t id, uint64_t up_to);
bool ocp_stream_is_idle(const ocp_stream *stream);
/* Work that the stream enqueues from now on waits for that of another stream of its device up to a number. */
void ocp_stream_waits(ocp_stream *stream, uint64_t id, uint64_t up_to);
/* Finds out without waiting which streams have become idle. */
void ocp_pool_poll(ocp_device *device);
/* Waits for every stream that has unfinished work. */
int ocp_pool_synchronize(ocp_device *device, ocp_error *error);
/* Those that wait to be borrowed. */
void ocp_pool_release_idle_streams(ocp_pool *pool);

#endif
