/* OrtEpProfilerImpl: the activities of our devices as events of ORT's profile.
 *
 *     CreateProfiler            for a session, and for each Run that is profiled by itself
 *     StartProfiling            a listener begins
 *     StartEvent ... StopEvent  around each event of ORT's own: the calling thread is in it
 *     EndProfiling              the activities become events, which ORT appends to its own
 *     Release
 *
 * On a GPU Python starts CUPTI when a profile starts, and reads it when that ends. No Run of a profile calls Python. */
#ifndef OCP_ORT_PROFILE_PROFILER_H
#define OCP_ORT_PROFILE_PROFILER_H

#include "base/error.h"
#include "device/device.h"

/* NULL with the error. provider: the name of the EP; it outlives the profiler. */
OrtEpProfilerImpl *ocp_profiler_create(ocp_device *device, const char *provider, ocp_error *error);

#endif
