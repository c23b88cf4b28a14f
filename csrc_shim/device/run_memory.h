/* Records which memory belongs to a captured CUDA graph.
 *
 * A captured graph holds the addresses of a Run's temporary tensors, so the arena must not hand this memory to other
 * users while the graph exists. Therefore such a Run is *watched*: each allocation that its thread makes on the device
 * is recorded as a block. If any thread frees a recorded block, the block returns to the record instead of the arena,
 * and serves later allocations of the Run. */
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
  bool captured; /* the Run is in a stream capture, which forbids driver calls that may synchronize */
  bool foreign;  /* the capture is the application's: the Run may still allocate from the driver */
} ocp_run_memory;

/* Starts to record the allocations of the calling thread's Run in `memory`. Allocations reuse its freed blocks first.
 * `captured`: the Run is in a stream capture. */
int ocp_run_memory_watch(ocp_run_memory *memory, ocp_device *device, bool captured, ocp_error *error);
/* Ends the recording: blocks that are freed later no longer return to the record. May be called on another thread; the
 * recording thread then stops recording at its next ocp_run_memory_forget. */
void ocp_run_memory_unwatch(ocp_run_memory *memory);
/* Stops recording on the calling thread, whose previous Run may never have called ocp_run_memory_unwatch. */
void ocp_run_memory_forget(void);
/* Suspends recording on the calling thread; ocp_run_memory_resume with the returned value resumes it. */
ocp_run_memory *ocp_run_memory_pause(void);
void ocp_run_memory_resume(ocp_run_memory *paused);
/* Removes the blocks in use from the record: the application owns them (outputs), and frees them as usual. */
void ocp_run_memory_forget_held(ocp_run_memory *memory);

/* ---- for code that hands out memory ---- */
/* Whether the calling thread's Run is watched (see above) and is in a stream capture. */
bool ocp_run_memory_is_captured(void);
/* Whether the calling thread's Run is watched and is in a stream capture of the application. */
bool ocp_run_memory_is_foreign(void);
/* Returns the address of a block of at least `bytes` that the calling thread's watched Run has freed, and marks it as
 * in use. Returns 0 if it finds none. */
uint64_t ocp_run_memory_reuse(const ocp_device *device, int memory, size_t bytes);
/* Records an allocation of the calling thread's watched Run. False: out of host memory. */
bool ocp_run_memory_allocated(const ocp_device *device, int memory, uint64_t address, size_t bytes);
/* Gives a block that is being freed back to the record of the watched Run that allocated it, on any thread. Returns
 * false if there is no such Run. */
bool ocp_run_memory_keeps(const ocp_device *device, int memory, uint64_t address);

#endif
