/* Members of the driver table: streams. */
#ifndef OCP_EMULATOR_CALLS_STREAM_H
#define OCP_EMULATOR_CALLS_STREAM_H

#include "driver/driver.h"

CUresult emu_ctx_synchronize(void);
CUresult emu_stream_create(CUstream *stream, unsigned flags);
CUresult emu_stream_destroy(CUstream stream);
CUresult emu_stream_synchronize(CUstream stream);
CUresult emu_stream_query(CUstream stream);
CUresult emu_stream_get_ctx(CUstream stream, CUcontext *context);

#endif
