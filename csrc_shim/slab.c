/* Packing of buffers by lifetime. Finding the smallest block is NP-hard; greedy placement of the largest first into the
 * tightest gap is within a few percent of the lower bound on real graphs (Pisarchyk and Lee, "Efficient Memory
 * Management for Deep Neural Net Inference", 2020). Where it misses the bound, a second order is tried. */
#include "slab.h"

#include <stdbool.h>
#include <stdlib.h>

static const uint64_t max_total = UINT64_C(1) << 62;

static uint64_t align(uint64_t bytes) { return (bytes + OCP_SLAB_ALIGNMENT - 1) & ~(uint64_t)(OCP_SLAB_ALIGNMENT - 1); }

static bool alive_together(const ocp_slab_item *a, const ocp_slab_item *b) {
  return a->first <= b->last && b->first <= a->last;
}

/* Larger first; among equals the longer lived, then the earlier. */
static int by_size(const void *left, const void *right) {
  const ocp_slab_item *a = *(ocp_slab_item *const *)left, *b = *(ocp_slab_item *const *)right;
  if (align(a->bytes) != align(b->bytes))
    return align(a->bytes) > align(b->bytes) ? -1 : 1;
  const uint32_t life_a = a->last - a->first, life_b = b->last - b->first;
  if (life_a != life_b)
    return life_a > life_b ? -1 : 1;
  if (a->first != b->first)
    return a->first < b->first ? -1 : 1;
  return a < b ? -1 : a > b;
}

/* Longer lived first, then larger: what lives long goes to the bottom and fragments nothing. */
static int by_life(const void *left, const void *right) {
  const ocp_slab_item *a = *(ocp_slab_item *const *)left, *b = *(ocp_slab_item *const *)right;
  const uint32_t life_a = a->last - a->first, life_b = b->last - b->first;
  if (life_a != life_b)
    return life_a > life_b ? -1 : 1;
  return by_size(left, right);
}

/* Places the items in the given order, each into the tightest gap between those placed before it that are alive with
 * it. Reorders `order` by offset on the way. Returns the bytes of the block. */
static uint64_t place(ocp_slab_item **order, uint32_t count) {
  uint64_t total = 0;
  for (uint32_t i = 0; i < count; i++) {
    ocp_slab_item *item = order[i];
    const uint64_t bytes = align(item->bytes);
    uint64_t best = UINT64_MAX, best_gap = UINT64_MAX, end = 0;
    for (uint32_t k = 0; k < i; k++) {
      const ocp_slab_item *placed = order[k];
      if (!alive_together(item, placed))
        continue;
      if (placed->offset > end && placed->offset - end >= bytes && placed->offset - end < best_gap) {
        best = end;
        best_gap = placed->offset - end;
      }
      if (placed->offset + align(placed->bytes) > end)
        end = placed->offset + align(placed->bytes);
    }
    item->offset = best != UINT64_MAX ? best : end;
    if (item->offset + bytes > total)
      total = item->offset + bytes;
    /* order[0 .. i] stays sorted by offset. */
    uint32_t k = i;
    for (; k > 0 && order[k - 1]->offset > item->offset; k--)
      order[k] = order[k - 1];
    order[k] = item;
  }
  return total;
}

typedef struct event {
  uint64_t step; /* an item starts at 2 * first and ends at 2 * last + 1 */
  uint64_t bytes;
} event;

static int by_step(const void *left, const void *right) {
  const event *a = left, *b = right;
  return a->step < b->step ? -1 : a->step > b->step;
}

/* The most bytes alive at one step: no block is smaller. */
static uint64_t lower_bound(ocp_slab_item *const *items, uint32_t count, event *events) {
  for (uint32_t i = 0; i < count; i++) {
    events[2 * i] = (event){2 * (uint64_t)items[i]->first, align(items[i]->bytes)};
    events[2 * i + 1] = (event){2 * (uint64_t)items[i]->last + 1, align(items[i]->bytes)};
  }
  qsort(events, 2 * (size_t)count, sizeof *events, by_step);
  uint64_t alive = 0, most = 0;
  for (uint32_t i = 0; i < 2 * count; i++) {
    alive = events[i].step % 2 ? alive - events[i].bytes : alive + events[i].bytes;
    if (alive > most)
      most = alive;
  }
  return most;
}

uint64_t ocp_slab_pack(ocp_slab_item *items, uint32_t count) {
  /* Empty items need no room: offset 0 is as good as any. */
  uint64_t sum = 0;
  uint32_t used = 0;
  for (uint32_t i = 0; i < count; i++) {
    items[i].offset = 0;
    if (items[i].bytes > max_total || (sum += align(items[i].bytes)) > max_total)
      return UINT64_MAX;
    used += items[i].bytes != 0;
  }
  if (used == 0)
    return 0;
  char *scratch = malloc(used * (sizeof(ocp_slab_item *) + sizeof(uint64_t) + 2 * sizeof(event)));
  if (!scratch)
    return UINT64_MAX;
  event *events = (event *)scratch;
  uint64_t *first_offsets = (uint64_t *)(events + 2 * (size_t)used);
  ocp_slab_item **order = (ocp_slab_item **)(first_offsets + used);
  uint32_t n = 0;
  for (uint32_t i = 0; i < count; i++)
    if (items[i].bytes)
      order[n++] = &items[i];
  const uint64_t bound = lower_bound(order, used, events);
  qsort(order, used, sizeof *order, by_size);
  uint64_t total = place(order, used);
  if (total > bound) {
    n = 0;
    for (uint32_t i = 0; i < count; i++)
      if (items[i].bytes) {
        first_offsets[n] = items[i].offset;
        order[n++] = &items[i];
      }
    qsort(order, used, sizeof *order, by_life);
    const uint64_t second = place(order, used);
    if (second < total) {
      total = second;
    } else {
      n = 0;
      for (uint32_t i = 0; i < count; i++)
        if (items[i].bytes)
          items[i].offset = first_offsets[n++];
    }
  }
  free(scratch);
  return total;
}
