/* Members of the driver table: stream-ordered allocation. */
#ifndef OCP_EMULATOR_CALLS_ASYNC_ALLOC_H
#define OCP_EMULATOR_CALLS_ASYNC_ALLOC_H

#include "driver/driver.h"

CUresult emu_mem_alloc_from_pool_async(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream);
CUresult emu_mem_free_async(CUdeviceptr address, CUstream stream);

#endif
