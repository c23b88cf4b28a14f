/* LRU cache of a cluster's idle instances, by key. The instance that was used last is not in the hash table, but in
 * `last_used`, from which a Run with the same key takes it without a lock. */
#ifndef OCP_RUN_INSTANCE_INSTANCE_CACHE_H
#define OCP_RUN_INSTANCE_INSTANCE_CACHE_H

#include <pthread.h>

#include "device/stream.h"
#include "run/instance/instance.h"

#define OCP_CACHE_BUCKETS 64u

typedef struct ocp_instance_cache {
  _Atomic(ocp_instance *) last_used;
  pthread_mutex_t mutex; /* never held across a driver call; taken before a pool's lock */
  ocp_instance *buckets[OCP_CACHE_BUCKETS];
  ocp_instance *newest, *oldest;
  size_t bytes;
  uint32_t count;
} ocp_instance_cache;

void ocp_instance_cache_init(ocp_instance_cache *cache);
void ocp_instance_cache_destroy(ocp_instance_cache *cache);

/* Takes an instance with that key out of the cache; if it has a graph, work on `stream` comes after the graph's latest
 * launch. NULL when there is none. */
ocp_instance *ocp_instance_cache_take(ocp_instance_cache *cache, const uint64_t *key, uint32_t words,
                                      const ocp_stream *stream);
/* Replaces `instance`, which is new and in no cache, by the most recently used instance of the hash table if both would
 * enqueue the same work. Then the older instance gets the key of `instance` (ocp_instance_become) and is taken out of
 * the cache and returned, and `instance` is freed. So one graph serves Runs whose keys differ in numbers that no launch
 * uses. Otherwise returns `instance`, which inherits from the older one (ocp_instance_inherit). */
ocp_instance *ocp_instance_cache_exchange(ocp_instance_cache *cache, ocp_instance *instance, const ocp_stream *stream);
/* Adds an instance to the cache. */
void ocp_instance_cache_put(ocp_instance_cache *cache, ocp_instance *instance);
/* Takes the graph away from the least recently used instance that has a graph; NULL when no instance in the cache has
 * one. */
struct ocp_replay *ocp_instance_cache_take_replay(ocp_instance_cache *cache);

#endif
