/* Packing of buffers with known lifetimes into one block of memory. */
#ifndef OCP_SLAB_H
#define OCP_SLAB_H

#include <stdint.h>

#define OCP_SLAB_ALIGNMENT 256u

typedef struct ocp_slab_item {
  uint64_t bytes;       /* at most 2^62 */
  uint32_t first, last; /* alive from step first to step last, both inclusive */
  uint64_t offset;      /* set by ocp_slab_pack; a multiple of OCP_SLAB_ALIGNMENT */
} ocp_slab_item;

/* Gives each item an offset such that items alive at one step do not overlap. Returns the bytes of the block, or
 * UINT64_MAX when the sizes overflow or host memory runs out. Takes host memory for each step between the first and the
 * last one at which an item starts. */
uint64_t ocp_slab_pack(ocp_slab_item *items, uint32_t count);

#endif
