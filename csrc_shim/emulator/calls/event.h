/* Members of the driver table: events. */
#ifndef OCP_EMULATOR_CALLS_EVENT_H
#define OCP_EMULATOR_CALLS_EVENT_H

#include "driver/driver.h"

CUresult emu_stream_wait_event(CUstream stream, CUevent event, unsigned flags);
CUresult emu_event_create(CUevent *event, unsigned flags);
CUresult emu_event_destroy(CUevent event);
CUresult emu_event_record(CUevent event, CUstream stream);
CUresult emu_event_synchronize(CUevent event);
CUresult emu_event_query(CUevent event);
CUresult emu_event_elapsed_time(float *milliseconds, CUevent start, CUevent end);

#endif
