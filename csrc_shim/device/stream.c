#include "device/stream.h"

#include <stdlib.h>

#include "base/counters.h"
#include "base/process.h"
#include "device/order.h"
#include "device/pool.h"
#include "device/release.h"

/* All streams of all devices, searched by handle. There are few, so a list suffices. */
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static ocp_stream **all_streams;
static size_t num_streams, max_streams;
static atomic_uint all_generation = 1; /* increases with each change of the list */

static bool list_stream(ocp_stream *stream) {
  pthread_mutex_lock(&all_lock);
  if (num_streams == max_streams) {
    size_t grown = max_streams ? 2 * max_streams : 16;
    ocp_stream **streams = realloc(all_streams, grown * sizeof *streams);
    if (!streams) {
      pthread_mutex_unlock(&all_lock);
      return false;
    }
    all_streams = streams;
    max_streams = grown;
  }
  all_streams[num_streams++] = stream;
  atomic_fetch_add(&all_generation, 1);
  pthread_mutex_unlock(&all_lock);
  return true;
}

static void unlist_stream(const ocp_stream *stream) {
  pthread_mutex_lock(&all_lock);
  for (size_t i = 0; i < num_streams; i++)
    if (all_streams[i] == stream) {
      all_streams[i] = all_streams[--num_streams];
      break;
    }
  atomic_fetch_add(&all_generation, 1);
  pthread_mutex_unlock(&all_lock);
}

static ocp_stream *find(const ocp_device *device, const void *handle) {
  for (size_t i = 0; i < num_streams; i++)
    if ((const void *)all_streams[i]->handle == handle && (!device || all_streams[i]->device == device))
      return all_streams[i];
  return NULL;
}

ocp_stream *ocp_stream_of_handle(const ocp_device *device, void *handle) {
  typedef struct answer {
    const ocp_device *device;
    void *handle;
    ocp_stream *stream;
    unsigned generation;
  } answer;
  /* The calling thread's latest look-up on any device, and on a given one: a thread mostly looks up the same stream. */
  static _Thread_local answer answers[2];
  answer *latest = &answers[device != NULL];
  unsigned generation = atomic_load_explicit(&all_generation, memory_order_acquire);
  if (latest->handle == handle && latest->device == device && latest->generation == generation)
    return latest->stream;
  pthread_mutex_lock(&all_lock);
  latest->stream = find(device, handle);
  latest->generation = atomic_load_explicit(&all_generation, memory_order_relaxed);
  pthread_mutex_unlock(&all_lock);
  latest->handle = handle;
  latest->device = device;
  return latest->stream;
}

ocp_stream *ocp_stream_of_state(ocp_stream_slot_id slot, const void *state) {
  ocp_stream *found = NULL;
  pthread_mutex_lock(&all_lock);
  for (size_t i = 0; i < num_streams && !found; i++)
    found = all_streams[i]->slots[slot].state == state ? all_streams[i] : NULL;
  pthread_mutex_unlock(&all_lock);
  return found;
}

/* Makes an ocp_stream for the CUDA stream `handle`; NULL: for a new CUDA stream. */
static int make(ocp_device *device, CUstream handle, ocp_stream **out, ocp_error *error) {
  *out = NULL;
  ocp_stream *stream = calloc(1, sizeof *stream);
  struct ocp_stream_private *priv = calloc(1, sizeof *priv);
  if (!stream || !priv) {
    ocp_fail_memory(error);
    goto failed;
  }
  stream->device = device;
  stream->handle = handle;
  stream->owned = !handle;
  stream->priv = priv;
  atomic_init(&priv->users, 1);
  atomic_init(&priv->pending_from, OCP_IDLE);
  pthread_mutex_init(&priv->turn_lock, NULL);
  pthread_cond_init(&priv->turn_ended, NULL);
  CUresult result = handle ? CUDA_SUCCESS : device->driver->StreamCreate(&stream->handle, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) {
    ocp_device_fail(device, result, "cuStreamCreate", error);
    goto failed;
  }
  if (!list_stream(stream)) {
    if (stream->owned)
      ocp_device_released(device, device->driver->StreamDestroy(stream->handle), "cuStreamDestroy");
    ocp_fail_memory(error);
    goto failed;
  }
  pthread_mutex_lock(&device->pool->lock);
  priv->id = ++device->pool->last_stream_id;
  priv->next = device->pool->streams;
  device->pool->streams = stream;
  pthread_mutex_unlock(&device->pool->lock);
  ocp_count(OCP_STREAMS_LIVE, 1);
  *out = stream;
  return ORT_OK;
failed:
  free(priv);
  free(stream);
  return error->code;
}

int ocp_stream_create(ocp_device *device, ocp_stream **out, ocp_error *error) {
  *out = NULL;
  OCP_STAY stay = ocp_device_enter(device, error);
  return stay.entered ? make(device, NULL, out, error) : error->code;
}

/* Serializes adoption: two threads that adopt one stream must get the same object. */
static pthread_mutex_t adopt_lock = PTHREAD_MUTEX_INITIALIZER;

int ocp_stream_adopt(ocp_device *device, CUstream handle, ocp_stream **out, ocp_error *error) {
  *out = NULL;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  handle = handle ? handle : CU_STREAM_LEGACY;
  CUcontext context = NULL;
  CUresult result = device->driver->StreamGetCtx(handle, &context);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "cuStreamGetCtx", error);
  if (context != device->context)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "stream %p belongs to another CUDA context than the primary one of device %d. Create the stream in "
                    "the primary context of this device",
                    (void *)handle, device->ordinal);
  pthread_mutex_lock(&adopt_lock);
  pthread_mutex_lock(&all_lock);
  if ((*out = find(device, handle)))
    ocp_stream_share(*out);
  pthread_mutex_unlock(&all_lock);
  if (!*out)
    make(device, handle, out, error);
  pthread_mutex_unlock(&adopt_lock);
  return *out ? ORT_OK : error->code;
}

ocp_stream *ocp_stream_share(ocp_stream *stream) {
  atomic_fetch_add(&stream->priv->users, 1);
  return stream;
}

/* Drops a reference. Returns whether it was the last one; from then on look-ups do not find the stream. */
static bool leave(ocp_stream *stream) {
  pthread_mutex_lock(&adopt_lock);
  bool last = atomic_fetch_sub(&stream->priv->users, 1) == 1;
  if (last)
    unlist_stream(stream);
  pthread_mutex_unlock(&adopt_lock);
  return last;
}

void ocp_stream_release(ocp_stream *stream) {
  if (!stream || atomic_load(&ocp_forked) || !leave(stream))
    return;
  ocp_device *device = stream->device;
  ocp_pool *pool = device->pool;
  ocp_error ignored;
  /* Waits for the stream's work, because memory freed on a destroyed stream counts as unused. */
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (stay.entered)
    ocp_stream_wait(stream, &ignored);
  for (int i = 0; i < OCP_NUM_SLOTS; i++)
    if (stream->slots[i].state && stream->slots[i].release)
      stream->slots[i].release(stream->slots[i].state);
  pthread_mutex_lock(&pool->streams_lock);
  pthread_mutex_lock(&pool->lock);
  ocp_stream **link = &pool->streams;
  while (*link != stream)
    link = &(*link)->priv->next;
  *link = stream->priv->next;
  pthread_mutex_unlock(&pool->lock);
  if (stream->owned)
    ocp_device_released(device, device->driver->StreamDestroy(stream->handle), "cuStreamDestroy");
  pthread_mutex_unlock(&pool->streams_lock);
  ocp_count(OCP_STREAMS_LIVE, -1);
  free(stream->priv);
  free(stream);
}

/* A lost device runs nothing, so all work on it counts as finished. */
static bool is_lost(const ocp_device *device) { return atomic_load_explicit(&device->lost, memory_order_relaxed); }

int ocp_stream_wait(ocp_stream *stream, ocp_error *error) {
  ocp_device *device = stream->device;
  uint64_t position = ocp_stream_position(stream);
  CUresult result = device->driver->StreamSynchronize(stream->handle);
  const int code = result == CUDA_SUCCESS ? ORT_OK : ocp_device_fail(device, result, "cuStreamSynchronize", error);
  if (code == ORT_OK || is_lost(device))
    ocp_stream_set_completed(stream, position);
  return code;
}

void ocp_stream_query(ocp_stream *stream) {
  ocp_device *device = stream->device;
  const uint64_t position = ocp_stream_position(stream);
  const CUresult result = device->driver->StreamQuery(stream->handle);
  ocp_error ignored;
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY)
    ocp_device_fail(device, result, "cuStreamQuery", &ignored); /* marks the device lost; the next call on it fails */
  if (result == CUDA_SUCCESS || is_lost(device))
    ocp_stream_set_completed(stream, position);
}

int ocp_stream_synchronize(ocp_stream *stream, ocp_error *error) {
  OCP_STAY stay = ocp_device_enter(stream->device, error);
  return stay.entered ? ocp_stream_wait(stream, error) : error->code;
}

bool ocp_stream_is_captured(const ocp_stream *stream) {
  int status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = stream->device->driver->StreamIsCapturing(stream->handle, &status);
  /* While a blocking stream is being captured, the driver refuses to query the legacy default stream. */
  return result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
         (result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
}

bool ocp_stream_is_recorded(const ocp_stream *stream) {
  return atomic_load_explicit(&stream->capturing, memory_order_relaxed) ||
         (!stream->owned && ocp_stream_is_captured(stream));
}

CUresult ocp_stream_end_capture(ocp_stream *stream, CUgraph *graph) {
  const ocp_driver *driver = stream->device->driver;
  const CUresult result = driver->StreamEndCapture(stream->handle, graph);
  if (result == CUDA_SUCCESS)
    return result;
  if (*graph)
    ocp_device_released(stream->device, driver->GraphDestroy(*graph), "cuGraphDestroy");
  *graph = NULL;
  stream->priv->left_open = ocp_stream_is_captured(stream);
  ocp_error ignored;
  ocp_stream_close_capture(stream, &ignored);
  return result;
}

int ocp_stream_close_capture(ocp_stream *stream, ocp_error *error) {
  if (!stream->priv->left_open)
    return ORT_OK;
  const ocp_driver *driver = stream->device->driver;
  CUgraph graph = NULL;
  OCP_STAY stay = ocp_device_enter_to_release(stream->device);
  const CUresult result = driver->StreamEndCapture(stream->handle, &graph);
  stream->priv->left_open = result != CUDA_SUCCESS && ocp_stream_is_captured(stream);
  if (result == CUDA_SUCCESS && graph)
    ocp_device_released(stream->device, driver->GraphDestroy(graph), "cuGraphDestroy");
  return stream->priv->left_open
             ? ocp_device_fail(stream->device, result, "ending a capture that failed before: cuStreamEndCapture", error)
             : ORT_OK;
}

/* Takes a turn (ocp_stream_take_turn) unless other threads' turns exclude it. Lock-free: every Run does this. */
static bool try_turn(struct ocp_stream_private *priv, bool alone) {
  const unsigned in_the_way = alone ? ~(unsigned)OCP_TURN_WANTED : OCP_TURN_ALONE;
  unsigned turns = atomic_load_explicit(&priv->turns, memory_order_relaxed);
  while (!(turns & in_the_way))
    if (atomic_compare_exchange_weak(&priv->turns, &turns, turns + (alone ? OCP_TURN_ALONE : 1)))
      return true;
  return false;
}

void ocp_stream_take_turn(ocp_stream *stream, bool alone) {
  struct ocp_stream_private *priv = stream->priv;
  pthread_mutex_lock(&priv->turn_lock);
  priv->want_alone += alone;
  for (;;) {
    /* Set before try_turn: from here on, ocp_stream_end_turn takes the lock to wake this thread. */
    atomic_fetch_or(&priv->turns, OCP_TURN_WANTED);
    if ((alone || !priv->want_alone) && try_turn(priv, alone)) /* an exclusive turn goes first */
      break;
    pthread_cond_wait(&priv->turn_ended, &priv->turn_lock);
  }
  priv->want_alone -= alone;
  pthread_mutex_unlock(&priv->turn_lock);
}

bool ocp_stream_try_turn(ocp_stream *stream) { return try_turn(stream->priv, /*alone=*/false); }

void ocp_stream_end_turn(ocp_stream *stream) {
  struct ocp_stream_private *priv = stream->priv;
  const bool alone = atomic_load_explicit(&priv->turns, memory_order_relaxed) & OCP_TURN_ALONE;
  if (!(atomic_fetch_sub(&priv->turns, alone ? OCP_TURN_ALONE : 1) & OCP_TURN_WANTED))
    return;
  pthread_mutex_lock(&priv->turn_lock);
  atomic_fetch_and(&priv->turns, ~(unsigned)OCP_TURN_WANTED); /* threads that still have to wait set the bit again */
  pthread_cond_broadcast(&priv->turn_ended);
  pthread_mutex_unlock(&priv->turn_lock);
}

static ocp_stream *take_idle(ocp_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  ocp_stream *stream = pool->idle_streams;
  if (stream)
    pool->idle_streams = stream->priv->next_idle;
  pthread_mutex_unlock(&pool->lock);
  return stream;
}

int ocp_stream_borrow(ocp_device *device, ocp_stream **out, ocp_error *error) {
  *out = take_idle(device->pool);
  return *out ? ORT_OK : ocp_stream_create(device, out, error);
}

void ocp_stream_return(ocp_stream *stream) {
  ocp_pool *pool = stream->device->pool;
  if (stream->priv->left_open) { /* no Run can use a stream with an open capture */
    ocp_stream_release(stream);
    return;
  }
  pthread_mutex_lock(&pool->lock);
  stream->priv->next_idle = pool->idle_streams;
  pool->idle_streams = stream;
  pthread_mutex_unlock(&pool->lock);
}

void ocp_pool_release_idle_streams(ocp_pool *pool) {
  for (ocp_stream *stream; (stream = take_idle(pool));)
    ocp_stream_release(stream);
}
