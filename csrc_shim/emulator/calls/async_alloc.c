/* Stream-ordered allocation of the emulated driver (cuMemAllocFromPoolAsync, cuMemFreeAsync). */
#include "emulator/calls/async_alloc.h"

#include "emulator/heap.h"
#include "emulator/mempool.h"
#include "emulator/op.h"
#include "emulator/shadow.h"
#include "emulator/state.h"
#include "emulator/work/capture.h"
#include "emulator/work/enqueue.h"
#include "emulator/work/queue.h"
#include "emulator/work/stream_list.h"

CUresult emu_mem_alloc_from_pool_async(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream) {
  CUresult result = emu_enter_stream(&stream);
  /* In a capture, CUDA would add an allocation node to the graph. No caller needs that, so it is not emulated. */
  if (result || (result = emu_capture_forbids(stream)))
    return result;
  if (!address || bytes == 0 || bytes > stream->device->heap.capacity)
    return bytes && address ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
  const uint64_t rounded = (bytes + EMU_GRANULE - 1) / EMU_GRANULE * EMU_GRANULE;
  result = emu_mempool_allocate(address, rounded, pool);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    emu_queue_run_all(); /* deferred work may contain frees */
    emu_shadow_flush(stream->device);
    result = emu_mempool_allocate(address, rounded, pool);
  }
  if (result == CUDA_ERROR_OUT_OF_MEMORY)
    return emu_fail(result, "no room for %zu bytes on emulated device %d", bytes, stream->device->ordinal);
  return result;
}

CUresult emu_mem_free_async(CUdeviceptr address, CUstream stream) {
  CUresult result = emu_leave();
  if (result)
    return result;
  if (emu_lost()) { /* a lost device runs no enqueued frees, so this call frees at once */
    emu_mempool_run_free(address);
    return emu_lost();
  }
  if ((result = emu_enter_stream(&stream)) || (result = emu_capture_forbids(stream)))
    return result;
  if (!emu_mempool_begin_free(address))
    return emu_fail(CUDA_ERROR_INVALID_VALUE, "no allocation of a memory pool starts at 0x%llx",
                    (unsigned long long)address);
  emu_op op = {.kind = EMU_OP_FREE, .free = {address}};
  result = emu_enqueue(stream, &op);
  if (result)
    emu_mempool_cancel_free(address);
  return result;
}
