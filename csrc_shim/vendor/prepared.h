/* LRU cache of the algorithms (cuBLASLt) or execution plans (cuDNN) of one problem, by the sizes of calls.
 *
 * A call, and a graph that has captured a call, holds a reference to its entry. A full cache evicts the least recently
 * used entries without references. It frees them after the device has synchronized, because their kernels may still
 * run. */
#ifndef OCP_VENDOR_PREPARED_H
#define OCP_VENDOR_PREPARED_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { OCP_MAX_KEY = 40 };

/* An entry of the cache: a key and its algorithm. While it is in a list, only its atomic members and those guarded by a
 * lock change. */
typedef struct ocp_prepared {
  struct ocp_prepared *next;
  uint32_t holders; /* number of references; guarded by the list's lock */
  bool stays;       /* true: never evicted, because a graph that ORT or the application captured refers to it; guarded
                       by the list's lock */
  atomic_bool executed; /* true: has run outside of captures, so its kernels are loaded */
  pthread_mutex_t lock; /* held during a call if one thread at a time may use the algorithm */
  uint32_t key_words;
  int64_t key[OCP_MAX_KEY];
  void *algorithm;                  /* made by the library's `prepare` */
  atomic_bool refused;              /* true: the library has refused the call, and is not called again */
  _Atomic(const void *) substitute; /* computes the call if it is refused; NULL until it is made: substitute.h */
} ocp_prepared;

typedef struct ocp_prepared_list {
  pthread_mutex_t lock;
  ocp_prepared *first; /* the entry that was used last */
  uint32_t count;
} ocp_prepared_list;

void ocp_prepared_init(ocp_prepared_list *list);
/* Makes an entry without an algorithm; NULL: out of memory. */
ocp_prepared *ocp_prepared_create(const int64_t *key, uint32_t words);
/* Frees the entries of a linked list. */
void ocp_prepared_free(ocp_prepared *chain, void (*release)(void *algorithm));
/* Finds the entry for the key and adds a reference for the caller. Returns NULL if the list lacks the key. All keys of
 * a list have the same number of words. */
ocp_prepared *ocp_prepared_find(ocp_prepared_list *list, const int64_t *key, uint32_t words);
/* Adds a new entry, with a reference for the caller. */
void ocp_prepared_insert(ocp_prepared_list *list, ocp_prepared *prepared);
void ocp_prepared_let_go(ocp_prepared_list *list, ocp_prepared *prepared);
/* Excludes the entry from eviction until the problem is released. */
void ocp_prepared_keep(ocp_prepared_list *list, ocp_prepared *prepared);
bool ocp_prepared_are_too_many(ocp_prepared_list *list);
/* Removes all entries except the 96 that were used last, those with a reference, and those whose `stays` is true.
 * Returns the removed entries as a linked list for ocp_prepared_free. */
ocp_prepared *ocp_prepared_evict(ocp_prepared_list *list);

#endif
