/* Static memory planning: packs buffers with known lifetimes into one slab. */
#ifndef OCP_PLAN_SLAB_H
#define OCP_PLAN_SLAB_H

#include <stdint.h>

#define OCP_SLAB_ALIGNMENT 256u

typedef struct ocp_slab_item {
  uint64_t bytes;       /* at most 2^62 */
  uint32_t first, last; /* alive from step first to step last, both inclusive; a step is the index of a record */
  uint64_t offset;      /* set by ocp_slab_pack; a multiple of OCP_SLAB_ALIGNMENT */
} ocp_slab_item;

/* Gives each item an offset, so that items alive at one step do not overlap. Returns the bytes of the slab, or one of
 * the two values below. Needs host memory in proportion to the difference between the highest and the lowest `first` of
 * the items. */
#define OCP_SLAB_OVERFLOW UINT64_MAX        /* the sizes are too large together */
#define OCP_SLAB_NO_MEMORY (UINT64_MAX - 1) /* host memory ran out */
uint64_t ocp_slab_pack(ocp_slab_item *items, uint32_t count);

#endif
