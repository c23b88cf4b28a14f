/* External semaphores of the emulated driver (cuImportExternalSemaphore, ...): timeline semaphores in shared memory
 * (work/timeline.h). */
#ifndef OCP_EMULATOR_EXTERNAL_EXTERNAL_SEMAPHORE_H
#define OCP_EMULATOR_EXTERNAL_EXTERNAL_SEMAPHORE_H

#include "driver/driver.h"

/* Members of the driver table. */
CUresult emu_import_external_semaphore(CUexternalSemaphore *semaphore, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *desc);
CUresult emu_signal_external_semaphores(const CUexternalSemaphore *semaphores,
                                        const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *params, unsigned count,
                                        CUstream stream);
CUresult emu_wait_external_semaphores(const CUexternalSemaphore *semaphores,
                                      const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *params, unsigned count,
                                      CUstream stream);
CUresult emu_destroy_external_semaphore(CUexternalSemaphore semaphore);

#endif
