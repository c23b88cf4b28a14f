/* Faults of the emulated devices, with which tests rehearse what a GPU may do: a kernel that is wrong in one element
 * or writes nothing, a driver call that is unsupported, and devices that are too old, busy or small, or are MIG
 * instances.
 *
 * ORT_CUDA_PLUGIN_EMULATE_FAULTS, or ocp_emu_config.faults, lists them as "key=value;key=value":
 *
 *   kernel=PATTERN            after each launch of a kernel whose name matches, one element of each result is wrong
 *   idle=PATTERN              launches of a kernel whose name matches do nothing
 *   unsupported=CALL,CALL     these calls return CUDA_ERROR_NOT_SUPPORTED; names are those of driver.h: MemPoolCreate
 *   exclusive=1               another process uses the device exclusively: the context cannot be created
 *   capability=7.5            compute capability
 *   driver=12.8               CUDA version of the driver
 *   multiprocessors=16        number of multiprocessors
 *   name=TEXT                 name of the device
 *
 * If faults are set, a warning on the standard error says so. */
#ifndef OCP_EMULATOR_FAULT_H
#define OCP_EMULATOR_FAULT_H

#include <stdbool.h>
#include <stddef.h>

#include "driver/driver.h"
#include "emulator/config.h"
#include "emulator/op.h"

typedef struct emu_faults {
  char kernel[OCP_EMU_FAULT_BYTES];      /* pattern of fnmatch; empty: all kernels are right */
  char idle[OCP_EMU_FAULT_BYTES];        /* pattern of fnmatch; empty: all kernels run */
  char unsupported[OCP_EMU_FAULT_BYTES]; /* names of driver calls, separated by commas */
  char name[OCP_EMU_FAULT_BYTES];        /* empty: the emulated device's own */
  bool exclusive;
  int cc_major, cc_minor, driver_version, multiprocessors; /* 0: the emulated device's own */
} emu_faults;

/* Returns the faults that are set. */
const emu_faults *emu_faults_set(void);
/* Sets the faults that the text lists; "" sets none. False, with the reason in `why`, if the text is invalid. */
bool emu_faults_configure(const char *text, char *why, size_t why_bytes);
/* Replaces the unsupported members of this driver table by a failing function, now and whenever the faults change. */
void emu_faults_attach(ocp_driver *table);

/* Whether the launch does nothing. */
bool emu_is_idle(const emu_op *launch);

/* The memory behind the pointer parameters of a launch whose results a fault makes wrong. */
typedef struct emu_wrong emu_wrong;
/* Called before a launch. Returns NULL if no fault applies to its kernel. */
emu_wrong *emu_wrong_begin(const emu_op *launch);
/* Called after the launch: changes one element of each result whose bytes the launch has changed. If it has changed no
 * byte, further launches find one output, in which this function then changes an element. True if the launch has to run
 * again for that. */
bool emu_wrong_again(emu_wrong *wrong);
void emu_wrong_end(emu_wrong *wrong);

#endif
