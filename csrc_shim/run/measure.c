#include "run/measure.h"

#include <stdlib.h>

#include "base/counters.h"
#include "device/device.h"
#include "device/release.h"
#include "device/stream.h"
#include "run/cluster_state.h"
#include "run/executor.h"

enum { WARM_RUNS = 3, BATCHES = 7, MOST_RUNS = 64 }; /* MOST_RUNS: maximum executions per batch */
static const float BATCH_MS = 1;                     /* minimum ms of a batch of fewer than MOST_RUNS executions */
static const float TOTAL_MS = 400; /* ms; if all batches would take longer together, there are fewer batches */

typedef struct measurement {
  ocp_cluster *cluster;
  ocp_stream *stream;
  CUevent begin, end;
} measurement;

static int no_output(void *context, uint32_t index, const int64_t *dims, uint32_t rank, void **data, ocp_error *error) {
  (void)context, (void)index, (void)dims, (void)rank, (void)data;
  return ocp_fail(error, ORT_INVALID_GRAPH,
                  "internal error: the program that the autotuner times has an output. Please report it");
}

static int run(const measurement *m, int runs, ocp_error *error) {
  const ocp_input none = {0};
  for (int i = 0; i < runs; ++i)
    if (ocp_cluster_run(m->cluster, m->stream, &none, 0, no_output, NULL, error) != ORT_OK)
      return error->code;
  return ORT_OK;
}

/* Times `runs` executions of the cluster between two events. */
static int time_runs(const measurement *m, int runs, float *milliseconds, ocp_error *error) {
  ocp_device *const device = m->stream->device;
  CUresult result = device->driver->EventRecord(m->begin, m->stream->handle);
  if (!result && run(m, runs, error) != ORT_OK)
    return error->code;
  if (!result)
    result = device->driver->EventRecord(m->end, m->stream->handle);
  if (!result)
    result = device->driver->EventSynchronize(m->end);
  if (!result)
    result = device->driver->EventElapsedTime(milliseconds, m->begin, m->end);
  return result ? ocp_device_fail(device, result, "timing a kernel", error) : ORT_OK;
}

static int ascending(const void *a, const void *b) {
  const float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static int measure(const measurement *m, double *seconds, ocp_error *error) {
  float once, times[BATCHES];
  if (run(m, WARM_RUNS, error) != ORT_OK || time_runs(m, 1, &once, error) != ORT_OK)
    return error->code;
  int runs = 1, batches = BATCHES;
  while (runs < MOST_RUNS && once * (float)runs < BATCH_MS)
    runs *= 2;
  while (batches > 1 && once * (float)(runs * batches) > TOTAL_MS)
    batches -= 2;
  for (int i = 0; i < batches; ++i) {
    if (time_runs(m, runs, &times[i], error) != ORT_OK)
      return error->code;
  }
  qsort(times, (size_t)batches, sizeof *times, ascending);
  *seconds = (double)times[batches / 2] * 1e-3 / runs;
  ocp_count(OCP_CANDIDATES_MEASURED, 1);
  return ORT_OK;
}

int ocp_cluster_measure(ocp_cluster *cluster, double *seconds, ocp_error *error) {
  ocp_device *const device = cluster->device;
  measurement m = {.cluster = cluster};
  error->code = ORT_OK;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered || ocp_stream_borrow(device, &m.stream, error) != ORT_OK)
    return error->code;
  /* Times launches of a CUDA graph, since sessions run the cluster in this way. */
  ocp_cluster_set_graphs(cluster, 1, 1);
  CUresult result = device->driver->EventCreate(&m.begin, CU_EVENT_DEFAULT);
  if (!result)
    result = device->driver->EventCreate(&m.end, CU_EVENT_DEFAULT);
  if (result)
    ocp_device_fail(device, result, "cuEventCreate", error);
  else
    measure(&m, seconds, error);
  /* Waits even after an error: enqueued work may still use memory that the caller then frees. */
  ocp_error late = {0};
  if (ocp_stream_synchronize(m.stream, &late) != ORT_OK && error->code == ORT_OK)
    *error = late;
  if (m.end)
    ocp_device_released(device, device->driver->EventDestroy(m.end), "cuEventDestroy");
  if (m.begin)
    ocp_device_released(device, device->driver->EventDestroy(m.begin), "cuEventDestroy");
  ocp_stream_return(m.stream);
  return error->code;
}
