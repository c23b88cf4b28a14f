/* Interprocess events of the emulated driver (CU_EVENT_INTERPROCESS, cuIpcGetEventHandle, cuIpcOpenEventHandle). The
 * processes share two counters of an event: recordings, and the newest recording whose stream has reached it. The
 * second one is a timeline (work/timeline.h): a recording is a signal, and a wait waits for the newest recording's
 * value. So, unlike on a GPU, a wait also ends when a later recording on another stream is reached first. */
#ifndef OCP_EMULATOR_EXTERNAL_IPC_EVENT_H
#define OCP_EMULATOR_EXTERNAL_IPC_EVENT_H

#include <stdbool.h>

#include "driver/driver.h"
#include "emulator/state.h"

typedef struct emu_ipc_event emu_ipc_event;

/* Makes the shared part of an event. */
CUresult emu_ipc_event_make(emu_ipc_event **out);
/* Ends this process's use of the event. Returns an error if this process exported the event and another process still
 * has it open; ends the use all the same. Ignores NULL. */
CUresult emu_ipc_event_destroy(emu_ipc_event *event);
/* Enqueue a recording on the stream, or a wait for the newest recording of any process. */
CUresult emu_ipc_event_record(emu_ipc_event *event, CUstream stream);
CUresult emu_ipc_event_wait(const emu_ipc_event *event, CUstream stream);
/* Whether the stream of the newest recording has reached it. Called with emu_order held (work/queue.h). */
bool emu_ipc_event_is_done(const emu_ipc_event *event);
/* Waits until the stream of the newest recording has reached it. The device is lost if that takes longer than the
 * configuration allows for an external semaphore. */
CUresult emu_ipc_event_synchronize(const emu_ipc_event *event, emu_device *device);

/* Members of the driver table. */
CUresult emu_ipc_get_event_handle(CUipcEventHandle *handle, CUevent event);
CUresult emu_ipc_open_event_handle(CUevent *event, CUipcEventHandle handle);

#endif
