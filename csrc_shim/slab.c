/* Packing of buffers by lifetime. Finding the smallest block is NP-hard; greedy placement of the largest first into the
 * tightest gap is within a few percent of the lower bound on real graphs (Pisarchyk and Lee, "Efficient Memory
 * Management for Deep Neural Net Inference", 2020). Where it misses the bound, other orders are tried. */
#include "slab.h"

#include <stdbool.h>
#include <stdlib.h>

static const uint64_t max_total = UINT64_C(1) << 62;

static uint64_t align(uint64_t bytes) { return (bytes + OCP_SLAB_ALIGNMENT - 1) & ~(uint64_t)(OCP_SLAB_ALIGNMENT - 1); }

static bool alive_together(const ocp_slab_item *a, const ocp_slab_item *b) {
  return a->first <= b->last && b->first <= a->last;
}

/* ---- orders of placement; equal items keep the order of their steps, so that results do not depend on qsort ---- */

static int compare(uint64_t a, uint64_t b) { return a < b ? -1 : a > b; }

static int by_step(const void *left, const void *right) {
  const ocp_slab_item *a = *(ocp_slab_item *const *)left, *b = *(ocp_slab_item *const *)right;
  const int first = compare(a->first, b->first);
  return first ? first : compare((uintptr_t)a, (uintptr_t)b);
}

/* Larger first. */
static int by_size(const void *left, const void *right) {
  const ocp_slab_item *a = *(ocp_slab_item *const *)left, *b = *(ocp_slab_item *const *)right;
  const int size = compare(align(b->bytes), align(a->bytes));
  const int life = compare(b->last - b->first, a->last - a->first);
  return size ? size : life ? life : by_step(left, right);
}

/* Longer lived first: what lives long goes to the bottom and fragments nothing. */
static int by_life(const void *left, const void *right) {
  const ocp_slab_item *a = *(ocp_slab_item *const *)left, *b = *(ocp_slab_item *const *)right;
  const int life = compare(b->last - b->first, a->last - a->first);
  return life ? life : by_size(left, right);
}

static const struct strategy {
  int (*order)(const void *, const void *);
  bool at_the_ends; /* rather at the bottom or the top than in the tightest gap: neighbours of a chain alternate */
} strategies[] = {{by_size, false}, {by_step, true}, {by_life, false}};
enum { NUM_STRATEGIES = sizeof strategies / sizeof *strategies };

/* Where an item goes, given those placed before it, which are sorted by offset. */
static uint64_t find_offset(const ocp_slab_item *item, ocp_slab_item *const *placed, uint32_t count, bool at_the_ends,
                            uint64_t top) {
  const uint64_t bytes = align(item->bytes);
  uint64_t best = UINT64_MAX, best_gap = UINT64_MAX, end = 0;
  for (uint32_t k = 0; k < count; k++) {
    if (!alive_together(item, placed[k]))
      continue;
    const uint64_t start = placed[k]->offset;
    if (start > end && start - end >= bytes) {
      if (at_the_ends && end == 0)
        return 0;
      if (start - end < best_gap) {
        best = end;
        best_gap = start - end;
      }
    }
    if (start + align(placed[k]->bytes) > end)
      end = start + align(placed[k]->bytes);
  }
  if (at_the_ends && end > 0 && end + bytes <= top)
    return top - bytes;
  return best != UINT64_MAX ? best : end;
}

/* Places the items in the given order, which it changes to that of their offsets. Returns the bytes of the block. */
static uint64_t place(ocp_slab_item **order, uint32_t count, bool at_the_ends, uint64_t top) {
  uint64_t total = 0;
  for (uint32_t i = 0; i < count; i++) {
    ocp_slab_item *item = order[i];
    item->offset = find_offset(item, order, i, at_the_ends, top);
    if (item->offset + align(item->bytes) > total)
      total = item->offset + align(item->bytes);
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

static int by_event_step(const void *left, const void *right) {
  const event *a = left, *b = right;
  return compare(a->step, b->step);
}

/* The most bytes alive at one step: no block is smaller. */
static uint64_t lower_bound(ocp_slab_item *const *items, uint32_t count, event *events) {
  for (uint32_t i = 0; i < count; i++) {
    events[2 * i] = (event){2 * (uint64_t)items[i]->first, align(items[i]->bytes)};
    events[2 * i + 1] = (event){2 * (uint64_t)items[i]->last + 1, align(items[i]->bytes)};
  }
  qsort(events, 2 * (size_t)count, sizeof *events, by_event_step);
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
  uint64_t *best_offsets = (uint64_t *)(events + 2 * (size_t)used);
  ocp_slab_item **order = (ocp_slab_item **)(best_offsets + used);
  uint64_t bound = 0, best = UINT64_MAX;
  for (int s = 0; s < NUM_STRATEGIES && best > bound; s++) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++)
      if (items[i].bytes)
        order[n++] = &items[i];
    if (s == 0)
      bound = lower_bound(order, used, events);
    qsort(order, used, sizeof *order, strategies[s].order);
    const uint64_t total = place(order, used, strategies[s].at_the_ends, bound);
    if (total >= best)
      continue;
    best = total;
    n = 0;
    for (uint32_t i = 0; i < count; i++)
      if (items[i].bytes)
        best_offsets[n++] = items[i].offset;
  }
  for (uint32_t i = 0, n = 0; i < count; i++)
    if (items[i].bytes)
      items[i].offset = best_offsets[n++];
  free(scratch);
  return best;
}
