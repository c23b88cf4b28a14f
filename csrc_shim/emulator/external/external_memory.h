/* External memory of the emulated driver (cuImportExternalMemory, ...): a file in memory (memfd) that the process
 * shares with its exporter. Each buffer is a mapping of the file at addresses of the importing device. */
#ifndef OCP_EMULATOR_EXTERNAL_EXTERNAL_MEMORY_H
#define OCP_EMULATOR_EXTERNAL_EXTERNAL_MEMORY_H

#include "driver/driver.h"

/* Members of the driver table. */
CUresult emu_import_external_memory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc);
CUresult emu_external_memory_get_mapped_buffer(CUdeviceptr *address, CUexternalMemory memory,
                                               const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc);
CUresult emu_destroy_external_memory(CUexternalMemory memory);

#endif
