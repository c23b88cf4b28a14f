/* Barriers of a block that have a number, a count of threads, or reduce a predicate, for kernels. */
#ifndef OCP_EMULATOR_BLOCKS_BARRIER_H
#define OCP_EMULATOR_BLOCKS_BARRIER_H

#include <stdint.h>

#include "emulator/blocks/block.h"
#include "emulator/kernel.h"

/* barrier.sync, .arrive and .red: mode 0 sync, 1 arrive (does not wait), 2 popc, 3 and, 4 or. `threads` is the number
 * of threads that take part; 0: all of the block. Returns the reduction of the threads' predicates. */
uint32_t ocp_emu_numbered_barrier(ocp_emu_thread *thread, uint32_t number, uint32_t threads, uint32_t mode,
                                  uint32_t predicate);

#endif
