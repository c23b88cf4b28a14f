/* What a library prepared for one problem, by sizes: the most recently used ones.
 *
 * A call, and a graph that has captured one, holds what it uses. When there are too many, those that nobody holds and
 * that were not used for the longest time go, once the device has finished: a kernel that runs may be theirs. */
#ifndef OCP_VENDOR_PREPARED_H
#define OCP_VENDOR_PREPARED_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { OCP_MAX_KEY = 40 };

/* Only what is atomic or under a lock changes once it is in a list. */
typedef struct ocp_prepared {
  struct ocp_prepared *next;
  uint32_t holders;     /* under the list's lock */
  bool stays;           /* a graph that is not ours has it. Under the list's lock. */
  atomic_bool executed; /* outside of captures: its kernels are loaded */
  pthread_mutex_t lock; /* of a call, where the algorithm is for one thread at a time */
  uint32_t key_words;
  int64_t key[OCP_MAX_KEY];
  void *algorithm; /* the library's own */
} ocp_prepared;

typedef struct ocp_prepared_list {
  pthread_mutex_t lock;
  ocp_prepared *first; /* the one that was used last */
  uint32_t count;
} ocp_prepared_list;

void ocp_prepared_init(ocp_prepared_list *list);
/* NULL: out of memory. */
ocp_prepared *ocp_prepared_create(const int64_t *key, uint32_t words);
/* Frees all of a chain. */
void ocp_prepared_free(ocp_prepared *chain, void (*release)(void *algorithm));
/* The one for the key, held by the caller, or NULL. All keys of a list have as many words. */
ocp_prepared *ocp_prepared_find(ocp_prepared_list *list, const int64_t *key, uint32_t words);
/* Puts in a new one, which the caller holds. */
void ocp_prepared_insert(ocp_prepared_list *list, ocp_prepared *prepared);
void ocp_prepared_let_go(ocp_prepared_list *list, ocp_prepared *prepared);
/* It stays until the problem is released. */
void ocp_prepared_keep(ocp_prepared_list *list, ocp_prepared *prepared);
bool ocp_prepared_are_too_many(ocp_prepared_list *list);
/* Takes out all but the latest ones and those that are held, as a chain for ocp_prepared_free. */
ocp_prepared *ocp_prepared_evict(ocp_prepared_list *list);

#endif
