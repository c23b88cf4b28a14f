/* Ownership of the memory that a captured CUDA graph refers to.
 *
 * A captured graph holds the addresses of a Run's temporary tensors, so the arena must not hand this memory to other
 * users while the graph lives. While a thread watches its Run, each of its allocations on the device is recorded. A
 * block that any thread frees meanwhile returns to the Run instead of the arena, and serves the Run's later
 * allocations. */
#ifndef OCP_DEVICE_RUN_MEMORY_H
#define OCP_DEVICE_RUN_MEMORY_H

#include "base/error.h"
#include "device/device.h"

typedef struct ocp_run_block {
  struct ocp_run_block *next;
  uint64_t address;
  size_t bytes;
  int memory;
  bool freed; /* true: the Run has freed the block and may allocate it again */
} ocp_run_block;

typedef struct ocp_run_memory {
  ocp_device *device;
  ocp_run_block *blocks;
  bool captured; /* a stream capture is open: driver calls that may synchronize are forbidden */
  bool foreign;  /* the capture is the application's: the Run allocates from the driver all the same */
} ocp_run_memory;

/* Starts to record the allocations of the calling thread's Run. An allocation reuses a freed block of `memory` first.
 * `captured`: the Run is in a stream capture. */
int ocp_run_memory_watch(ocp_run_memory *memory, ocp_device *device, bool captured, ocp_error *error);
/* Stops recording; may be called on another thread. */
void ocp_run_memory_unwatch(ocp_run_memory *memory);
/* Stops recording on the calling thread, even if a Run failed before its ocp_run_memory_unwatch. */
void ocp_run_memory_forget(void);
/* Suspends recording on the calling thread; ocp_run_memory_resume with the returned value resumes it. */
ocp_run_memory *ocp_run_memory_pause(void);
void ocp_run_memory_resume(ocp_run_memory *paused);
/* Forgets the blocks that are still in use: the application owns them (outputs), and frees them as usual. */
void ocp_run_memory_forget_held(ocp_run_memory *memory);

/* ---- for code that hands out memory ---- */
/* Whether the calling thread watches a Run with an open stream capture. */
bool ocp_run_memory_is_captured(void);
/* Whether the calling thread watches a Run that the application captures. */
bool ocp_run_memory_is_foreign(void);
/* Takes a block of at least `bytes` that the calling thread's watched Run has freed; 0: none. */
uint64_t ocp_run_memory_reuse(const ocp_device *device, int memory, size_t bytes);
/* Records an allocation of the calling thread's watched Run. False: out of host memory. */
bool ocp_run_memory_allocated(const ocp_device *device, int memory, uint64_t address, size_t bytes);
/* Whether a watched Run, of any thread, takes back the block that is being freed. */
bool ocp_run_memory_keeps(const ocp_device *device, int memory, uint64_t address);

#endif
