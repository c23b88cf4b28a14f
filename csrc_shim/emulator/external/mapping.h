/* Ranges of shared files, mapped at addresses of an emulated device. */
#ifndef OCP_EMULATOR_EXTERNAL_MAPPING_H
#define OCP_EMULATOR_EXTERNAL_MAPPING_H

#include <stdbool.h>
#include <stdint.h>

#include "emulator/state.h"

/* The call that unmaps a range: cuMemFree, or cuIpcCloseMemHandle. */
typedef enum emu_mapping_kind { EMU_MAPPING_BUFFER, EMU_MAPPING_IPC } emu_mapping_kind;

/* A range of a file. `what` names the range in errors: "external memory". */
typedef struct emu_file_range {
  int fd;
  uint64_t offset, bytes;
  const char *what;
} emu_file_range;

/* Maps the range into the device's memory. The file must have the range, rounded to pages, and must not shrink. The
 * descriptor stays the caller's. */
CUresult emu_mapping_make(emu_device *device, const emu_file_range *range, emu_mapping_kind kind, CUdeviceptr *address);
/* Unmaps the range that starts at the address; false: no mapping of this kind starts there. */
bool emu_mapping_end(CUdeviceptr address, emu_mapping_kind kind);
/* Finds the mapping that contains the address; false: there is none. */
bool emu_mapping_find(CUdeviceptr address, CUdeviceptr *start, uint64_t *bytes);

#endif
