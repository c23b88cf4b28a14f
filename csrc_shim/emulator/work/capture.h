/* Stream capture: operations of capturing streams become nodes of a graph. */
#ifndef OCP_EMULATOR_WORK_CAPTURE_H
#define OCP_EMULATOR_WORK_CAPTURE_H

#include <stdbool.h>

#include "driver/driver.h"
#include "emulator/op.h"
#include "emulator/record.h"
#include "emulator/state.h"

/* ---- called with the stream's lock or, in adversarial mode, emu_order held ---- */
/* Whether operations of the stream become graph nodes. *result: the error if a capture forbids operations of the
 * stream, else CUDA_SUCCESS. */
bool emu_is_capturing(CUstream stream, CUresult *result);
CUresult emu_capture_op(CUstream stream, const emu_op *op);
CUresult emu_capture_record(CUstream stream, CUevent event);
/* Whether the stream's wait for the event concerns a capture; if so, *result is the result of the wait. */
bool emu_capture_wait(CUstream stream, CUevent event, CUresult *result);
void emu_capture_forget(CUevent event);
/* ---- called without the stream's lock and emu_order ---- */
void emu_capture_leave(CUstream stream); /* the stream is about to be destroyed */
/* Returns the error of a call that may synchronize the device, such as an allocation, if a capture forbids it in the
 * calling thread's capture mode (ThreadExchangeStreamCaptureMode), and invalidates that capture; else CUDA_SUCCESS. */
CUresult emu_capture_unsafe(void);
/* Returns the error of waiting for the stream (NULL: for all streams) if a capture forbids that, and invalidates that
 * capture; else CUDA_SUCCESS. */
CUresult emu_capture_forbids(CUstream stream);
CUresult emu_capture_event(CUevent event);

/* Members of the driver table. */
CUresult emu_stream_begin_capture(CUstream stream, int mode);
CUresult emu_stream_end_capture(CUstream stream, CUgraph *graph);
CUresult emu_stream_is_capturing(CUstream stream, int *status);
CUresult emu_thread_exchange_stream_capture_mode(int *mode);

#endif
