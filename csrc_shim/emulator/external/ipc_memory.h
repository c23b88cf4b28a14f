/* CUDA IPC memory of the emulated driver (cuIpcGetMemHandle, ...). An export moves the pages of the allocation into a
 * file in memory, at the same addresses; an import maps that file. As on a GPU, whose allocations share blocks of
 * 2 MiB, an importer also sees those bytes of other allocations that lie in the first and last page of the imported
 * allocation. */
#ifndef OCP_EMULATOR_EXTERNAL_IPC_MEMORY_H
#define OCP_EMULATOR_EXTERNAL_IPC_MEMORY_H

#include "driver/driver.h"

/* Called before the allocation at the address is freed: ends its export, if it has one. Fails while another process has
 * the memory open; the memory then stays allocated. CUDA does not define what happens in this case. */
CUresult emu_ipc_memory_end_export(CUdeviceptr address);

/* Members of the driver table. */
CUresult emu_ipc_get_mem_handle(CUipcMemHandle *handle, CUdeviceptr address);
CUresult emu_ipc_open_mem_handle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags);
CUresult emu_ipc_close_mem_handle(CUdeviceptr address);

#endif
