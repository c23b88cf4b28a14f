/* Configuration, start and addresses of the emulated CUDA devices. CUDA calls go through the driver table (table.h). */
#ifndef OCP_EMULATOR_CALLS_EMULATOR_H
#define OCP_EMULATOR_CALLS_EMULATOR_H

#include <stddef.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/config.h"

/* Sets the configuration. Deferred work runs first. The number of devices and their memory can change only while no
 * memory, stream, event, module, graph or other object of the devices is alive. No other thread may use the devices
 * meanwhile. Returns 0, or a CUresult with the reason in text. The defaults come from the environment:
 * ORT_CUDA_PLUGIN_EMULATE_DEVICES, _MEMORY (bytes, K/M/G suffixes), _STREAMS (inline|adversarial), _SEED, _CHECK,
 * _WORKERS, _SEMAPHORE_SECONDS and _FAULTS. Init fails on an invalid value. */
int ocp_emu_configure(const ocp_emu_config *config, char *text, size_t text_bytes);
void ocp_emu_get_config(ocp_emu_config *config);

/* Returns the host alias of an emulated device address, for host implementations of library calls; NULL when the
 * range is not allocated. */
void *ocp_emu_host_pointer(uint64_t address, size_t bytes);
/* Returns 1 if the address lies in the emulated devices' address space, else 0. */
int ocp_emu_owns(uint64_t address);

/* Reads the configuration and reserves the address space of the devices, on the first call. */
CUresult emu_start(void);

#endif
