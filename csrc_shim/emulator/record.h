/* Events of the emulated driver, and the recordings that cuEventRecord makes of them. */
#ifndef OCP_EMULATOR_RECORD_H
#define OCP_EMULATOR_RECORD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"
#include "emulator/clock.h"

/* One recording of an event: a later recording of the same event does not affect waits for this one. */
typedef struct emu_record {
  atomic_int references;
  atomic_bool done;
  double time;      /* milliseconds of the host's clock */
  emu_clock *clock; /* checking mode: the operations that happened before the recording */
} emu_record;
emu_record *emu_record_make(void); /* NULL: out of memory */
/* Whether all work before the recording has run; true for NULL (an event that was never recorded). */
bool emu_record_is_done(const emu_record *record);
void emu_record_finish(emu_record *record);
emu_record *emu_record_share(emu_record *record);
void emu_record_release(emu_record *record);

struct CUevent_st {
  unsigned flags;
  emu_record *record;          /* the latest recording; NULL: never recorded */
  struct emu_capture *capture; /* the capture in which the event was last recorded; NULL: in no capture */
  struct CUgraphNode_st **nodes;
  uint32_t num_nodes;        /* nodes of the capture that a wait for the event waits for */
  struct CUevent_st *next;   /* next event of the capture */
  struct emu_ipc_event *ipc; /* external/ipc_event.h; NULL: an event of this process alone */
};

#endif
