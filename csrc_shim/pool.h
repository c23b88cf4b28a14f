/* The order of a device's streams and the memory cached between them; private to device.c, memory.c and stream.c.
 *
 * All work of a device is numbered from one sequence. ocp_stream_enqueued gives the end of a stream the next number,
 * and a stream knows below which number all its work has finished. Freed memory remembers the number at which it was
 * freed: another stream may have it when every stream that could have used it has finished what it was doing then. No
 * driver call is needed to find that out; synchronisations that happen anyhow advance the numbers. */
#ifndef OCP_POOL_H
#define OCP_POOL_H

#include <pthread.h>

#include "memory.h"

#define OCP_IDLE UINT64_MAX

struct ocp_stream_private {
  ocp_stream *next;      /* of the pool's streams */
  ocp_stream *next_idle; /* of those to borrow */
  uint64_t id;           /* never used twice */
  atomic_uint users;     /* the last one to release it ends it */
  /* Written under the lock; may be read without it by who enqueues on the stream. */
  atomic_ullong enqueued;     /* number of the latest work */
  atomic_ullong pending_from; /* all work below this number has finished; OCP_IDLE: all work has */
};

typedef struct ocp_cache ocp_cache; /* memory.c: the chunks of one kind of memory */
enum { OCP_DEVICE_MEMORY = 0, OCP_PINNED_MEMORY = 1, OCP_NUM_MEMORIES = 2 };

typedef struct ocp_pool {
  pthread_mutex_t lock; /* guards all below, and ocp_stream_private; never held in a driver call */
  uint64_t sequence, last_stream_id;
  ocp_stream *streams;
  ocp_stream *idle_streams; /* to borrow */
  ocp_cache *caches[OCP_NUM_MEMORIES];
  /* Held where somebody other than its owner waits for or queries a stream, and where a stream is destroyed. Taken
   * before lock. */
  pthread_mutex_t streams_lock;
} ocp_pool;

typedef struct ocp_memory_stats {
  int64_t in_use, max_in_use, cached; /* bytes */
  int64_t num_allocs, num_driver_allocs, num_trims, max_alloc_size;
} ocp_memory_stats;

ocp_pool *ocp_pool_create(void);
void ocp_pool_destroy(ocp_pool *pool); /* of a pool that was never used */

/* The two kinds of memory behind the functions of memory.h. free returns false for an address that is not handed out.
 * A known stream may be named, as in ocp_device_free. */
int ocp_pool_alloc(ocp_device *device, int memory, size_t bytes, ocp_stream *stream, uint64_t *address,
                   ocp_error *error);
bool ocp_pool_free(ocp_device *device, int memory, uint64_t address, ocp_stream *stream);
void ocp_pool_stats(ocp_device *device, int memory, ocp_memory_stats *stats);

/* Under lock: work was enqueued on the stream; all its work up to a number has finished. */
void ocp_pool_advance(ocp_pool *pool, ocp_stream *stream);
void ocp_pool_completed(ocp_stream *stream, uint64_t up_to);

/* The number of the stream's latest work; that all work up to a number has finished, of the stream with that id if it
 * still exists; whether the stream is known to have none left. */
uint64_t ocp_stream_position(const ocp_stream *stream);
void ocp_stream_completed(ocp_device *device, uint64_t id, uint64_t up_to);
bool ocp_stream_is_idle(const ocp_stream *stream);
/* Finds out without waiting which streams have become idle. */
void ocp_pool_poll(ocp_device *device);
/* Waits for every stream that has unfinished work. */
int ocp_pool_synchronize(ocp_device *device, ocp_error *error);
/* Those that wait to be borrowed. */
void ocp_pool_release_idle_streams(ocp_pool *pool);

#endif
