#include "run/instance/instance_cache.h"

#include <stdlib.h>
#include <string.h>

#include "device/order.h"

/* Limits of the cache. Concurrent Runs of one shape have an instance each, so the limits leave room for many threads.
 */
static const size_t max_bytes = (size_t)32 << 20;
static const uint32_t max_count = 128;

void ocp_instance_cache_init(ocp_instance_cache *cache) {
  memset(cache, 0, sizeof *cache);
  pthread_mutex_init(&cache->mutex, NULL);
}

void ocp_instance_cache_destroy(ocp_instance_cache *cache) {
  ocp_instance_free(atomic_load(&cache->last_used));
  for (ocp_instance *instance = cache->newest, *older; instance; instance = older) {
    older = instance->older;
    ocp_instance_free(instance);
  }
  pthread_mutex_destroy(&cache->mutex);
}

static ocp_instance **bucket_of(ocp_instance_cache *cache, uint64_t hash) {
  return &cache->buckets[(hash >> 32) % OCP_CACHE_BUCKETS];
}

/* Removes an instance from the table. `link`: the pointer to the instance in its bucket's chain. */
static void unlink_instance(ocp_instance_cache *cache, ocp_instance **link) {
  ocp_instance *instance = *link;
  *link = instance->chain;
  *(instance->newer ? &instance->newer->older : &cache->newest) = instance->older;
  *(instance->older ? &instance->older->newer : &cache->oldest) = instance->newer;
  cache->bytes -= instance->bytes;
  cache->count--;
}

static void insert(ocp_instance_cache *cache, ocp_instance *instance) {
  ocp_instance **bucket = bucket_of(cache, instance->hash);
  instance->chain = *bucket;
  *bucket = instance;
  instance->newer = NULL;
  instance->older = cache->newest;
  *(cache->newest ? &cache->newest->newer : &cache->oldest) = instance;
  cache->newest = instance;
  cache->bytes += instance->bytes;
  cache->count++;
}

/* Unlinks the oldest instances, but never the newest, while the cache exceeds its limits; returns them as a chain. */
static ocp_instance *evict(ocp_instance_cache *cache) {
  ocp_instance *evicted = NULL;
  while (cache->oldest != cache->newest && (cache->bytes > max_bytes || cache->count > max_count)) {
    ocp_instance *victim = cache->oldest, **link = bucket_of(cache, victim->hash);
    while (*link != victim)
      link = &(*link)->chain;
    unlink_instance(cache, link);
    victim->chain = evicted;
    evicted = victim;
  }
  return evicted;
}

static void put_into_table(ocp_instance_cache *cache, ocp_instance *instance) {
  pthread_mutex_lock(&cache->mutex);
  insert(cache, instance);
  ocp_instance *evicted = evict(cache);
  pthread_mutex_unlock(&cache->mutex);
  for (ocp_instance *next; evicted; evicted = next) {
    next = evicted->chain;
    ocp_instance_free(evicted);
  }
}

static bool fits(const ocp_instance *instance, const uint64_t *key, uint32_t words, const ocp_stream *stream) {
  return instance->key_words == words && memcmp(instance->key, key, words * sizeof *key) == 0 &&
         (!instance->replay || ocp_stream_comes_after(stream, instance->replay_stream_id, instance->replay_position));
}

ocp_instance *ocp_instance_cache_take(ocp_instance_cache *cache, const uint64_t *key, uint32_t words,
                                      const ocp_stream *stream) {
  ocp_instance *last_used = atomic_exchange_explicit(&cache->last_used, NULL, memory_order_acq_rel);
  if (last_used && fits(last_used, key, words, stream)) {
    last_used->used_again = true;
    return last_used;
  }
  if (last_used)
    put_into_table(cache, last_used);
  const uint64_t hash = ocp_instance_key_hash(key, words);
  pthread_mutex_lock(&cache->mutex);
  ocp_instance **link = bucket_of(cache, hash), *found;
  while ((found = *link) && !(found->hash == hash && fits(found, key, words, stream)))
    link = &found->chain;
  if (found) {
    unlink_instance(cache, link);
    found->used_again = true;
  }
  pthread_mutex_unlock(&cache->mutex);
  return found;
}

ocp_instance *ocp_instance_cache_exchange(ocp_instance_cache *cache, ocp_instance *instance, const ocp_stream *stream) {
  pthread_mutex_lock(&cache->mutex);
  ocp_instance *found = cache->newest;
  if (found && found->replay && !ocp_stream_comes_after(stream, found->replay_stream_id, found->replay_position))
    found = NULL;
  if (found) {
    ocp_instance **link = bucket_of(cache, found->hash);
    while (*link != found)
      link = &(*link)->chain;
    unlink_instance(cache, link);
    if (!ocp_instance_become(found, instance)) {
      ocp_instance_inherit(instance, found);
      insert(cache, found);
      found = NULL;
    }
  }
  pthread_mutex_unlock(&cache->mutex);
  if (!found)
    return instance;
  ocp_instance_free(instance);
  return found;
}

void ocp_instance_cache_put(ocp_instance_cache *cache, ocp_instance *instance) {
  ocp_instance *before = atomic_exchange_explicit(&cache->last_used, instance, memory_order_acq_rel);
  if (before)
    put_into_table(cache, before);
}

static struct ocp_replay *take_replay(ocp_instance *instance) {
  struct ocp_replay *replay = instance->replay;
  instance->replay = NULL;
  ocp_instance_cool(instance);
  return replay;
}

struct ocp_replay *ocp_instance_cache_take_replay(ocp_instance_cache *cache) {
  pthread_mutex_lock(&cache->mutex);
  ocp_instance *oldest = cache->oldest;
  while (oldest && !oldest->replay)
    oldest = oldest->newer;
  struct ocp_replay *replay = oldest ? take_replay(oldest) : NULL;
  pthread_mutex_unlock(&cache->mutex);
  if (replay)
    return replay;
  ocp_instance *last_used = atomic_exchange_explicit(&cache->last_used, NULL, memory_order_acq_rel);
  if (last_used) {
    replay = last_used->replay ? take_replay(last_used) : NULL;
    ocp_instance_cache_put(cache, last_used);
  }
  return replay;
}
