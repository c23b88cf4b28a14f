/* CUDA memory pools (CUmemoryPool) of the emulated devices, with frees in stream order. */
#ifndef OCP_EMULATOR_MEMPOOL_H
#define OCP_EMULATOR_MEMPOOL_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/state.h"

/* Allocates a block from the pool. Blocks whose free is enqueued but has not run count as in use. */
CUresult emu_mempool_allocate(CUdeviceptr *address, uint64_t bytes, CUmemoryPool pool);
/* Marks the block at the address because its free is about to be enqueued. Returns false if no block starts there, or
 * if its free is already enqueued. */
bool emu_mempool_begin_free(uint64_t address);
/* Clears the mark of emu_mempool_begin_free if the free could not be enqueued, so that the program can free the block
 * later. */
void emu_mempool_cancel_free(uint64_t address);
/* Frees the block: runs the operation that was enqueued. */
void emu_mempool_run_free(uint64_t address);
/* Whether a block of a pool, in use or not, starts at the address. */
bool emu_mempool_owns(uint64_t address);
/* Called when the program has waited for the device, a stream or an event: trims the pools to their release
 * thresholds. */
void emu_mempools_synchronized(const emu_device *device);

/* Members of the driver table. */
CUresult emu_mem_pool_create(CUmemoryPool *pool, const CUmemPoolProps *props);
CUresult emu_mem_pool_destroy(CUmemoryPool pool);
CUresult emu_mem_pool_set_attribute(CUmemoryPool pool, int attribute, void *value);
CUresult emu_mem_pool_get_attribute(CUmemoryPool pool, int attribute, void *value);
CUresult emu_mem_pool_trim_to(CUmemoryPool pool, size_t keep);

#endif
