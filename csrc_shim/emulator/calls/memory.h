/* Members of the driver table: device memory, page-locked memory, copies and memsets. */
#ifndef OCP_EMULATOR_CALLS_MEMORY_H
#define OCP_EMULATOR_CALLS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include "driver/driver.h"

CUresult emu_mem_get_info(size_t *free_bytes, size_t *total_bytes);
CUresult emu_mem_alloc(CUdeviceptr *address, size_t bytes);
CUresult emu_mem_free(CUdeviceptr address);
CUresult emu_mem_host_alloc(void **address, size_t bytes, unsigned flags);
CUresult emu_mem_free_host(void *address);
CUresult emu_memcpy_h2d(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream);
CUresult emu_memcpy_d2h(void *dst, CUdeviceptr src, size_t bytes, CUstream stream);
CUresult emu_memcpy_d2d(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream);
CUresult emu_memcpy_peer(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context, size_t bytes,
                         CUstream stream);
CUresult emu_memset_d8(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream);
CUresult emu_mem_get_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);
CUresult emu_pointer_get_attribute(void *data, int attribute, CUdeviceptr pointer);
bool emu_reuse(CUdeviceptr address, size_t bytes, size_t held, CUstream stream);
size_t emu_redzone(void);

#endif
