#include "vendor/prepared.h"

#include <stdlib.h>
#include <string.h>

/* A list with more than MOST entries evicts all but LEFT: evicting many at once amortizes the wait for the device. MOST
 * is also the maximum number of instances that a cluster caches. */
enum { MOST = 128, LEFT = 96 };

void ocp_prepared_init(ocp_prepared_list *list) {
  memset(list, 0, sizeof *list);
  pthread_mutex_init(&list->lock, NULL);
}

ocp_prepared *ocp_prepared_create(const int64_t *key, uint32_t words) {
  ocp_prepared *prepared = calloc(1, sizeof *prepared);
  if (!prepared)
    return NULL;
  prepared->key_words = words;
  memcpy(prepared->key, key, words * sizeof *key);
  pthread_mutex_init(&prepared->lock, NULL);
  return prepared;
}

void ocp_prepared_free(ocp_prepared *chain, void (*release)(void *algorithm)) {
  for (ocp_prepared *prepared = chain, *next; prepared; prepared = next) {
    next = prepared->next;
    release(prepared->algorithm);
    pthread_mutex_destroy(&prepared->lock);
    free(prepared);
  }
}

/* Moves an entry to the front of the list, under the lock. `link`: the pointer to the entry in the list. */
static void move_to_front(ocp_prepared_list *list, ocp_prepared **link) {
  ocp_prepared *prepared = *link;
  *link = prepared->next;
  prepared->next = list->first;
  list->first = prepared;
}

ocp_prepared *ocp_prepared_find(ocp_prepared_list *list, const int64_t *key, uint32_t words) {
  pthread_mutex_lock(&list->lock);
  ocp_prepared **link = &list->first, *found;
  while ((found = *link) && memcmp(found->key, key, words * sizeof *key) != 0)
    link = &found->next;
  if (found) {
    found->holders++;
    move_to_front(list, link);
  }
  pthread_mutex_unlock(&list->lock);
  return found;
}

void ocp_prepared_insert(ocp_prepared_list *list, ocp_prepared *prepared) {
  pthread_mutex_lock(&list->lock);
  prepared->holders = 1;
  prepared->next = list->first;
  list->first = prepared;
  list->count++;
  pthread_mutex_unlock(&list->lock);
}

void ocp_prepared_let_go(ocp_prepared_list *list, ocp_prepared *prepared) {
  pthread_mutex_lock(&list->lock);
  prepared->holders--;
  pthread_mutex_unlock(&list->lock);
}

void ocp_prepared_keep(ocp_prepared_list *list, ocp_prepared *prepared) {
  pthread_mutex_lock(&list->lock);
  prepared->stays = true;
  pthread_mutex_unlock(&list->lock);
}

bool ocp_prepared_are_too_many(ocp_prepared_list *list) {
  pthread_mutex_lock(&list->lock);
  const bool many = list->count > MOST;
  pthread_mutex_unlock(&list->lock);
  return many;
}

ocp_prepared *ocp_prepared_evict(ocp_prepared_list *list) {
  ocp_prepared *evicted = NULL;
  pthread_mutex_lock(&list->lock);
  uint32_t place = 0;
  for (ocp_prepared **link = &list->first, *prepared; (prepared = *link); place++) {
    if (place < LEFT || prepared->holders || prepared->stays) {
      link = &prepared->next;
      continue;
    }
    *link = prepared->next;
    prepared->next = evicted;
    evicted = prepared;
    list->count--;
  }
  pthread_mutex_unlock(&list->lock);
  return evicted;
}
