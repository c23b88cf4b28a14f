/* Packing of buffers by lifetime (dynamic storage allocation). Finding the smallest slab is NP-hard; greedy
 * placement, the largest buffer first, into the tightest gap is within a few percent of the lower bound on real graphs
 * (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020). If its result exceeds the
 * bound, other orders of placement are tried. */
#include "plan/slab.h"

#include <stdbool.h>
#include <stdlib.h>

static const uint64_t max_total = UINT64_C(1) << 62;

static uint64_t align(uint64_t bytes) { return (bytes + OCP_SLAB_ALIGNMENT - 1) & ~(uint64_t)(OCP_SLAB_ALIGNMENT - 1); }

/* ---- orders of placement; equal items keep the order of their steps, so that results do not depend on qsort ---- */

static int compare(uint64_t a, uint64_t b) { return a < b ? -1 : a > b; }

static int by_step(const void *left, const void *right) {
  const ocp_slab_item *a = *(ocp_slab_item *const *)left, *b = *(ocp_slab_item *const *)right;
  const int first = compare(a->first, b->first);
  return first ? first : compare((uintptr_t)a, (uintptr_t)b);
}

/* Sorts larger items first. */
static int by_size(const void *left, const void *right) {
  const ocp_slab_item *a = *(ocp_slab_item *const *)left, *b = *(ocp_slab_item *const *)right;
  const int size = compare(align(b->bytes), align(a->bytes));
  const int life = compare(b->last - b->first, a->last - a->first);
  return size ? size : life ? life : by_step(left, right);
}

/* Sorts longer-lived items first: at the bottom of the slab they leave no gaps between shorter-lived items. */
static int by_life(const void *left, const void *right) {
  const ocp_slab_item *a = *(ocp_slab_item *const *)left, *b = *(ocp_slab_item *const *)right;
  const int life = compare(b->last - b->first, a->last - a->first);
  return life ? life : by_size(left, right);
}

static const struct strategy {
  int (*order)(const void *, const void *);
  bool at_the_ends; /* prefer the bottom or the top of the slab to the tightest gap, so that consecutive tensors of a
                       chain alternate between the two ends */
} strategies[] = {{by_size, false}, {by_step, true}, {by_life, false}};
enum { NUM_STRATEGIES = sizeof strategies / sizeof *strategies };

/* An item with its offset. */
typedef struct placement {
  uint64_t start, end;
  uint32_t first, last;
} placement;

/* Finds the offset of an item, given the items placed before it, sorted by offset. `top`: the end of a slab of the
 * least possible size. */
static uint64_t find_offset(const ocp_slab_item *item, const placement *placed, uint32_t count, bool at_the_ends,
                            uint64_t top) {
  const uint64_t bytes = align(item->bytes);
  uint64_t best = UINT64_MAX, best_gap = UINT64_MAX, end = 0;
  for (const placement *p = placed; p < placed + count; p++) {
    if (item->first > p->last || p->first > item->last)
      continue;
    if (p->start > end && p->start - end >= bytes) {
      if (at_the_ends && end == 0)
        return 0;
      if (p->start - end < best_gap) {
        best = end;
        best_gap = p->start - end;
      }
    }
    if (p->end > end)
      end = p->end;
  }
  if (at_the_ends && end > 0 && end + bytes <= top)
    return top - bytes;
  return best != UINT64_MAX ? best : end;
}

/* Places the items in the given order and returns the bytes of the slab. `placed`: scratch for `count` placements. */
static uint64_t place(ocp_slab_item *const *order, uint32_t count, bool at_the_ends, uint64_t top, placement *placed) {
  uint64_t total = 0;
  for (uint32_t i = 0; i < count; i++) {
    ocp_slab_item *item = order[i];
    item->offset = find_offset(item, placed, i, at_the_ends, top);
    const placement here = {item->offset, item->offset + align(item->bytes), item->first, item->last};
    if (here.end > total)
      total = here.end;
    uint32_t k = i;
    for (; k > 0 && placed[k - 1].start > here.start; k--)
      placed[k] = placed[k - 1];
    placed[k] = here;
  }
  return total;
}

/* Returns the peak of live bytes over all steps, a lower bound of the slab's size; UINT64_MAX if host memory is
 * exhausted. */
static uint64_t lower_bound(ocp_slab_item *const *items, uint32_t count) {
  uint32_t first = UINT32_MAX, last = 0;
  for (uint32_t i = 0; i < count; i++) {
    first = items[i]->first < first ? items[i]->first : first;
    last = items[i]->first > last ? items[i]->first : last; /* live bytes only decrease after the last start */
  }
  uint64_t *change = calloc((size_t)(last - first) + 2, sizeof *change);
  if (!change)
    return UINT64_MAX;
  for (uint32_t i = 0; i < count; i++) {
    change[items[i]->first - first] += align(items[i]->bytes);
    if (items[i]->last < last)
      change[items[i]->last - first + 1] -= align(items[i]->bytes);
  }
  uint64_t alive = 0, most = 0;
  for (uint32_t step = 0; step <= last - first; step++) {
    alive += change[step];
    most = alive > most ? alive : most;
  }
  free(change);
  return most;
}

uint64_t ocp_slab_pack(ocp_slab_item *items, uint32_t count) {
  /* Empty items get offset 0. */
  uint64_t sum = 0;
  uint32_t used = 0;
  for (uint32_t i = 0; i < count; i++) {
    items[i].offset = 0;
    if (items[i].bytes > max_total || (sum += align(items[i].bytes)) > max_total)
      return OCP_SLAB_OVERFLOW;
    used += items[i].bytes != 0;
  }
  if (used == 0)
    return 0;
  char *scratch = malloc(used * (sizeof(placement) + sizeof(uint64_t) + sizeof(ocp_slab_item *)));
  if (!scratch)
    return OCP_SLAB_NO_MEMORY;
  placement *placed = (placement *)scratch;
  uint64_t *best_offsets = (uint64_t *)(placed + used);
  ocp_slab_item **order = (ocp_slab_item **)(best_offsets + used);
  uint64_t bound = 0, best = UINT64_MAX;
  for (int s = 0; s < NUM_STRATEGIES && best > bound; s++) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++)
      if (items[i].bytes)
        order[n++] = &items[i];
    if (s == 0)
      bound = lower_bound(order, used);
    qsort(order, used, sizeof *order, strategies[s].order);
    const uint64_t total = place(order, used, strategies[s].at_the_ends, bound, placed);
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
