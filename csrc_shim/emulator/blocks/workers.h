/* The pool of host threads that run blocks. */
#ifndef OCP_EMULATOR_BLOCKS_WORKERS_H
#define OCP_EMULATOR_BLOCKS_WORKERS_H

#include <stdint.h>

/* Calls run(context, first, last) for disjoint ranges of at most `chunk` indices that cover [0, count), in the calling
 * thread and the workers. Returns when all calls have returned. */
typedef void (*emu_range_fn)(void *context, uint64_t first, uint64_t last);
void emu_pool_run(emu_range_fn run, void *context, uint64_t count, uint64_t chunk);

#endif
