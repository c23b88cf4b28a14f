/* OrtEpProfilerImpl: the activities of the plugin's devices as events of ORT's profile.
 *
 *     CreateProfiler            for a session, and for each Run that is profiled by itself
 *     StartProfiling            starts to collect activities: kernels, copies and memsets (driver/activity.h)
 *     StartEvent ... StopEvent  around each of ORT's own events: work that the thread enqueues belongs to the event
 *     EndProfiling              the activities become events, which ORT appends to its own
 *     Release
 *
 * On a GPU, Python starts CUPTI when a profile starts, and reads its records when the profile ends. A profiled Run does
 * not call Python. */
#ifndef OCP_ORT_PROFILE_PROFILER_H
#define OCP_ORT_PROFILE_PROFILER_H

#include "base/error.h"
#include "device/device.h"

/* Makes a profiler; NULL with the error. provider: the name of the EP, which must outlive the profiler. */
OrtEpProfilerImpl *ocp_profiler_create(ocp_device *device, const char *provider, ocp_error *error);

#endif
