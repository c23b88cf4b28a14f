/* The memory of Runs that are watched, so that a CUDA graph of such a Run can keep it.
 *
 * While a thread watches, its allocations on the device are noted. If any thread frees one of them meanwhile, its
 * memory stays with the Run, which may get it again. No other Run gets it as long as a graph refers to it. */
#ifndef OCP_DEVICE_RUN_MEMORY_H
#define OCP_DEVICE_RUN_MEMORY_H

#include "base/error.h"
#include "device/device.h"

typedef struct ocp_run_block {
  struct ocp_run_block *next;
  uint64_t address;
  size_t bytes;
  int memory;
  bool freed; /* in the Run, so that it stays with it */
} ocp_run_block;

typedef struct ocp_run_memory {
  ocp_device *device;
  ocp_run_block *blocks;
  bool captured; /* by the thread that watches: calls that may wait for the device are not allowed */
} ocp_run_memory;

/* The calling thread watches its Run on the device from now on; its blocks so far are those that it may get again. */
int ocp_run_memory_watch(ocp_run_memory *memory, ocp_device *device, bool captured, ocp_error *error);
/* The end of that, on any thread. */
void ocp_run_memory_unwatch(ocp_run_memory *memory);
/* The calling thread watches no Run, even if the watch of the one before did not end. */
void ocp_run_memory_forget(void);
/* What the calling thread allocates until it resumes is not its Run's. */
ocp_run_memory *ocp_run_memory_pause(void);
void ocp_run_memory_resume(ocp_run_memory *paused);
/* For a Run that is no longer watched: its owner has the memory that it holds from now on. */
void ocp_run_memory_forget_held(ocp_run_memory *memory);

/* ---- for code that hands out memory ---- */
/* Whether the calling thread is capturing. */
bool ocp_run_memory_is_captured(void);
/* Memory that the Run which this thread watches has freed, of at least so many bytes, or 0. */
uint64_t ocp_run_memory_reuse(const ocp_device *device, int memory, size_t bytes);
/* Notes that this Run got memory. False: out of host memory. */
bool ocp_run_memory_allocated(const ocp_device *device, int memory, uint64_t address, size_t bytes);
/* Whether the memory that is being freed stays with a Run that is watched, on any thread. */
bool ocp_run_memory_keeps(const ocp_device *device, int memory, uint64_t address);

#endif
