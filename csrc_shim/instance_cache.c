#include "instance_cache.h"

#include <stdlib.h>
#include <string.h>

/* Concurrent Runs of one shape keep an instance each, so both limits leave room for many threads. */
static const size_t max_bytes = (size_t)64 << 20;
static const uint32_t max_count = 256;

uint64_t ocp_instance_key_hash(const uint64_t *key, uint32_t words) {
  uint64_t hash = words;
  for (uint32_t i = 0; i < words; i++) {
    hash = (hash ^ key[i]) * UINT64_C(0x9E3779B97F4A7C15);
    hash ^= hash >> 29;
  }
  return hash;
}

void ocp_instance_cache_init(ocp_instance_cache *cache) {
  memset(cache, 0, sizeof *cache);
  pthread_mutex_init(&cache->mutex, NULL);
}

void ocp_instance_cache_destroy(ocp_instance_cache *cache) {
  for (ocp_instance *instance = cache->newest, *older; instance; instance = older) {
    older = instance->older;
    free(instance);
  }
  pthread_mutex_destroy(&cache->mutex);
}

static ocp_instance **bucket_of(ocp_instance_cache *cache, uint64_t hash) {
  return &cache->buckets[(hash >> 32) % OCP_CACHE_BUCKETS];
}

/* link points at the pointer to the instance in its bucket's chain. */
static void unlink_instance(ocp_instance_cache *cache, ocp_instance **link) {
  ocp_instance *instance = *link;
  *link = instance->chain;
  *(instance->newer ? &instance->newer->older : &cache->newest) = instance->older;
  *(instance->older ? &instance->older->newer : &cache->oldest) = instance->newer;
  cache->bytes -= instance->bytes;
  cache->count--;
}

ocp_instance *ocp_instance_cache_take(ocp_instance_cache *cache, const uint64_t *key, uint32_t words, uint64_t hash) {
  pthread_mutex_lock(&cache->mutex);
  ocp_instance **link = bucket_of(cache, hash), *found;
  while ((found = *link) &&
         (found->hash != hash || found->key_words != words || memcmp(found->key, key, words * sizeof *key) != 0))
    link = &found->chain;
  if (found)
    unlink_instance(cache, link);
  pthread_mutex_unlock(&cache->mutex);
  return found;
}

void ocp_instance_cache_put(ocp_instance_cache *cache, ocp_instance *instance) {
  ocp_instance *evicted = NULL;
  pthread_mutex_lock(&cache->mutex);
  ocp_instance **bucket = bucket_of(cache, instance->hash);
  instance->chain = *bucket;
  *bucket = instance;
  instance->newer = NULL;
  instance->older = cache->newest;
  *(cache->newest ? &cache->newest->newer : &cache->oldest) = instance;
  cache->newest = instance;
  cache->bytes += instance->bytes;
  cache->count++;
  while (cache->oldest != instance && (cache->bytes > max_bytes || cache->count > max_count)) {
    ocp_instance *victim = cache->oldest, **link = bucket_of(cache, victim->hash);
    while (*link != victim)
      link = &(*link)->chain;
    unlink_instance(cache, link);
    victim->chain = evicted;
    evicted = victim;
  }
  pthread_mutex_unlock(&cache->mutex);
  for (ocp_instance *next; evicted; evicted = next) {
    next = evicted->chain;
    free(evicted);
  }
}
