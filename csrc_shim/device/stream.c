/* Streams, and what is known of their progress. */
#include <stdlib.h>

#include "device/pool.h"
#include "ort/capture.h"
#include "ort/memory.h"
#include "vendor/problem.h"

/* All streams of all devices by their handle; few, so a list. */
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static ocp_stream **all_streams;
static size_t num_streams, max_streams;
static atomic_uint all_generation = 1; /* counts the changes of the list */

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
  /* Of this thread, which asks for the same stream again and again, with its device and without. */
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

ocp_stream *ocp_stream_of_impl(const OrtSyncStreamImpl *impl) {
  ocp_stream *found = NULL;
  pthread_mutex_lock(&all_lock);
  for (size_t i = 0; i < num_streams && !found; i++)
    found = &all_streams[i]->ort == impl ? all_streams[i] : NULL;
  pthread_mutex_unlock(&all_lock);
  return found;
}

/* A stream around `handle`, or around a new one of its own where that is NULL. */
static int make(ocp_device *device, CUstream handle, ocp_stream **out, ocp_error *error) {
  *out = NULL;
  ocp_stream *stream = calloc(1, sizeof *stream);
  struct ocp_stream_private *priv = calloc(1, sizeof *priv);
  if (!stream || !priv) {
    ocp_fail(error, ORT_FAIL, "out of host memory");
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
      device->driver->StreamDestroy(stream->handle);
    ocp_fail(error, ORT_FAIL, "out of host memory");
    goto failed;
  }
  pthread_mutex_lock(&device->pool->lock);
  priv->id = ++device->pool->last_stream_id;
  priv->next = device->pool->streams;
  device->pool->streams = stream;
  pthread_mutex_unlock(&device->pool->lock);
  ocp_ort_init_stream(stream);
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
  return ocp_device_enter(device, error) == ORT_OK ? make(device, NULL, out, error) : error->code;
}

/* Two threads that adopt one stream must not make two of it. */
static pthread_mutex_t adopt_lock = PTHREAD_MUTEX_INITIALIZER;

int ocp_stream_adopt(ocp_device *device, CUstream handle, ocp_stream **out, ocp_error *error) {
  *out = NULL;
  if (ocp_device_enter(device, error) != ORT_OK)
    return error->code;
  handle = handle ? handle : CU_STREAM_LEGACY;
  CUcontext context = NULL;
  CUresult result = device->driver->StreamGetCtx(handle, &context);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(device, result, "cuStreamGetCtx", error);
  if (context != device->context)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "stream %p belongs to another CUDA context than the primary one of device %d", (void *)handle,
                    device->ordinal);
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

/* Whether that was the last user; then nobody finds the stream any more. */
static bool leave(ocp_stream *stream) {
  pthread_mutex_lock(&adopt_lock);
  bool last = atomic_fetch_sub(&stream->priv->users, 1) == 1;
  if (last)
    unlist_stream(stream);
  pthread_mutex_unlock(&adopt_lock);
  return last;
}

static int synchronize(ocp_stream *stream, ocp_error *error);

void ocp_stream_release(ocp_stream *stream) {
  if (!stream || atomic_load(&ocp_forked) || !leave(stream))
    return;
  ocp_device *device = stream->device;
  ocp_pool *pool = device->pool;
  ocp_error ignored;
  /* Memory freed on the stream counts as finished when the stream is gone, so it must be. */
  if (ocp_device_enter_to_release(device))
    synchronize(stream, &ignored);
  ocp_library_release_stream(stream);
  pthread_mutex_lock(&pool->streams_lock);
  pthread_mutex_lock(&pool->lock);
  ocp_stream **link = &pool->streams;
  while (*link != stream)
    link = &(*link)->priv->next;
  *link = stream->priv->next;
  pthread_mutex_unlock(&pool->lock);
  if (stream->owned)
    device->driver->StreamDestroy(stream->handle);
  pthread_mutex_unlock(&pool->streams_lock);
  ocp_count(OCP_STREAMS_LIVE, -1);
  free(stream->priv);
  free(stream);
}

static uint64_t load(const atomic_ullong *number) { return atomic_load_explicit(number, memory_order_acquire); }
static void store(atomic_ullong *number, uint64_t value) { atomic_store_explicit(number, value, memory_order_release); }

/* Whether this thread is in a Run; its address names the thread. */
static _Thread_local bool in_run;

void ocp_run_started(void) { in_run = true; }

void ocp_run_ended(ocp_device *device, bool waited) {
  in_run = false;
  if (waited)
    return;
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->lock);
  for (ocp_stream *stream = pool->streams; stream; stream = stream->priv->next)
    if (stream->priv->run == &in_run)
      stream->priv->run = NULL;
  pthread_mutex_unlock(&pool->lock);
}

void ocp_pool_advance(ocp_pool *pool, ocp_stream *stream) {
  struct ocp_stream_private *priv = stream->priv;
  const void *run = in_run ? &in_run : NULL;
  uint64_t number = ++pool->sequence;
  store(&priv->enqueued, number);
  if (load(&priv->pending_from) == OCP_IDLE) {
    store(&priv->pending_from, number);
    priv->run = run;
  } else if (priv->run != run) {
    priv->run = NULL;
  }
}

/* Under lock: all work of the stream up to a number has finished. */
static void set_completed(ocp_stream *stream, uint64_t up_to) {
  struct ocp_stream_private *priv = stream->priv;
  if (load(&priv->enqueued) <= up_to)
    store(&priv->pending_from, OCP_IDLE);
  else if (load(&priv->pending_from) <= up_to)
    store(&priv->pending_from, up_to + 1);
}

static bool was_waited_for(const ocp_stream *taker, const ocp_stream *stream, uint64_t up_to) {
  const struct ocp_stream_private *priv = taker->priv;
  for (unsigned i = 0; i < priv->num_waited && i < OCP_MAX_WAITED; i++)
    if (priv->waited[i].id == stream->priv->id)
      return priv->waited[i].position >= up_to || priv->waited[i].position >= load(&stream->priv->enqueued);
  return false;
}

bool ocp_pool_is_finished(const ocp_pool *pool, uint64_t stream_id, uint64_t up_to, const ocp_stream *taker) {
  if (taker && stream_id == taker->priv->id)
    return true;
  for (const ocp_stream *stream = pool->streams; stream; stream = stream->priv->next)
    if (stream != taker && (stream_id == 0 || stream_id == stream->priv->id) &&
        load(&stream->priv->pending_from) <= up_to && !(taker && was_waited_for(taker, stream, up_to)))
      return false;
  return true;
}

void ocp_stream_waits(ocp_stream *stream, uint64_t id, uint64_t up_to) {
  struct ocp_stream_private *priv = stream->priv;
  pthread_mutex_lock(&stream->device->pool->lock);
  unsigned slot = 0;
  while (slot < priv->num_waited && slot < OCP_MAX_WAITED && priv->waited[slot].id != id)
    slot++;
  if (slot == priv->num_waited || slot == OCP_MAX_WAITED)
    slot = priv->num_waited++ % OCP_MAX_WAITED;
  else if (priv->waited[slot].position > up_to)
    up_to = priv->waited[slot].position;
  priv->waited[slot].id = id;
  priv->waited[slot].position = up_to;
  pthread_mutex_unlock(&stream->device->pool->lock);
}

void ocp_stream_enqueued(ocp_stream *stream) {
  ocp_pool *pool = stream->device->pool;
  pthread_mutex_lock(&pool->lock);
  ocp_pool_advance(pool, stream);
  pthread_mutex_unlock(&pool->lock);
}

uint64_t ocp_stream_position(const ocp_stream *stream) { return load(&stream->priv->enqueued); }

bool ocp_stream_is_idle(const ocp_stream *stream) { return load(&stream->priv->pending_from) == OCP_IDLE; }

static void completed(ocp_stream *stream, uint64_t up_to) {
  ocp_pool *pool = stream->device->pool;
  pthread_mutex_lock(&pool->lock);
  set_completed(stream, up_to);
  pthread_mutex_unlock(&pool->lock);
}

void ocp_stream_completed(ocp_device *device, uint64_t id, uint64_t up_to) {
  pthread_mutex_lock(&device->pool->lock);
  for (ocp_stream *stream = device->pool->streams; stream; stream = stream->priv->next)
    if (stream->priv->id == id)
      set_completed(stream, up_to);
  pthread_mutex_unlock(&device->pool->lock);
}

/* On a lost device nothing runs any more: what uses memory there has finished, too. */
static bool is_lost(const ocp_device *device) { return atomic_load_explicit(&device->lost, memory_order_relaxed); }

static int synchronize(ocp_stream *stream, ocp_error *error) {
  ocp_device *device = stream->device;
  uint64_t position = ocp_stream_position(stream);
  CUresult result = device->driver->StreamSynchronize(stream->handle);
  const int code = result == CUDA_SUCCESS ? ORT_OK : ocp_device_fail(device, result, "cuStreamSynchronize", error);
  if (code == ORT_OK || is_lost(device))
    completed(stream, position);
  return code;
}

int ocp_stream_synchronize(ocp_stream *stream, ocp_error *error) {
  return ocp_device_enter(stream->device, error) == ORT_OK ? synchronize(stream, error) : error->code;
}

bool ocp_stream_is_captured(const ocp_stream *stream) {
  int status = CU_STREAM_CAPTURE_STATUS_NONE;
  return stream->device->driver->StreamIsCapturing(stream->handle, &status) == CUDA_SUCCESS &&
         status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUresult ocp_stream_end_capture(ocp_stream *stream, CUgraph *graph) {
  const ocp_driver *driver = stream->device->driver;
  const CUresult result = driver->StreamEndCapture(stream->handle, graph);
  if (result == CUDA_SUCCESS)
    return result;
  if (*graph)
    driver->GraphDestroy(*graph);
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
  ocp_device_enter_to_release(stream->device);
  const CUresult result = driver->StreamEndCapture(stream->handle, &graph);
  stream->priv->left_open = result != CUDA_SUCCESS && ocp_stream_is_captured(stream);
  if (result == CUDA_SUCCESS && graph)
    driver->GraphDestroy(graph);
  return stream->priv->left_open
             ? ocp_device_fail(stream->device, result, "ending a capture that failed before: cuStreamEndCapture", error)
             : ORT_OK;
}

void ocp_stream_take_turn(ocp_stream *stream, bool alone) {
  struct ocp_stream_private *priv = stream->priv;
  pthread_mutex_lock(&priv->turn_lock);
  priv->want_alone += alone;
  while (priv->alone || (alone ? priv->sharing : priv->want_alone)) /* who wants it alone comes first */
    pthread_cond_wait(&priv->turn_ended, &priv->turn_lock);
  priv->want_alone -= alone;
  priv->alone = alone;
  priv->sharing += !alone;
  pthread_mutex_unlock(&priv->turn_lock);
}

bool ocp_stream_try_turn(ocp_stream *stream) {
  struct ocp_stream_private *priv = stream->priv;
  pthread_mutex_lock(&priv->turn_lock);
  const bool free = !priv->alone;
  priv->sharing += free;
  pthread_mutex_unlock(&priv->turn_lock);
  return free;
}

void ocp_stream_end_turn(ocp_stream *stream) {
  struct ocp_stream_private *priv = stream->priv;
  pthread_mutex_lock(&priv->turn_lock);
  if (priv->alone)
    priv->alone = false;
  else
    priv->sharing--;
  pthread_cond_broadcast(&priv->turn_ended);
  pthread_mutex_unlock(&priv->turn_lock);
}

static bool is_busy(const ocp_stream *stream) { return !ocp_stream_is_idle(stream); }

/* Under lock: whether the calling thread can have heard of work that the stream has. */
static bool is_known_to_be_busy(const ocp_stream *stream) {
  const void *run = stream->priv->run;
  return is_busy(stream) && (!run || run == &in_run);
}

/* The stream after `stream`, or the first one, for which that holds; streams_lock is held, so that it lives. */
static ocp_stream *next_stream(ocp_pool *pool, const ocp_stream *stream, bool (*holds)(const ocp_stream *)) {
  pthread_mutex_lock(&pool->lock);
  ocp_stream *next = stream ? stream->priv->next : pool->streams;
  while (next && !holds(next))
    next = next->priv->next;
  pthread_mutex_unlock(&pool->lock);
  return next;
}

void ocp_pool_poll(ocp_device *device) {
  if (ocp_capture_is_active())
    return; /* a query would end the capture */
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->streams_lock);
  for (ocp_stream *stream = NULL; (stream = next_stream(pool, stream, is_busy));) {
    if (!ocp_stream_try_turn(stream))
      continue;
    uint64_t position = ocp_stream_position(stream);
    if (device->driver->StreamQuery(stream->handle) == CUDA_SUCCESS || is_lost(device))
      completed(stream, position);
    ocp_stream_end_turn(stream);
  }
  pthread_mutex_unlock(&pool->streams_lock);
}

/* Waits for the streams for which that holds, except for one that is being captured: it does no work. */
static int synchronize_streams(ocp_device *device, bool (*holds)(const ocp_stream *), ocp_error *error) {
  ocp_pool *pool = device->pool;
  int code = ORT_OK;
  pthread_mutex_lock(&pool->streams_lock);
  for (ocp_stream *stream = NULL; code == ORT_OK && (stream = next_stream(pool, stream, holds));) {
    if (!ocp_stream_try_turn(stream))
      continue;
    code = synchronize(stream, error);
    ocp_stream_end_turn(stream);
  }
  pthread_mutex_unlock(&pool->streams_lock);
  return code;
}

int ocp_pool_synchronize(ocp_device *device, ocp_error *error) { return synchronize_streams(device, is_busy, error); }

int ocp_device_synchronize(ocp_device *device, ocp_error *error) {
  return ocp_device_enter(device, error) == ORT_OK ? ocp_pool_synchronize(device, error) : error->code;
}

int ocp_device_settle(ocp_device *device, ocp_error *error) {
  if (ocp_device_enter(device, error) != ORT_OK)
    return error->code;
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->lock); /* mostly there is nothing to wait for, nor need for the other lock */
  const ocp_stream *stream = pool->streams;
  while (stream && !is_known_to_be_busy(stream))
    stream = stream->priv->next;
  pthread_mutex_unlock(&pool->lock);
  return stream ? synchronize_streams(device, is_known_to_be_busy, error) : ORT_OK;
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
  if (stream->priv->left_open) { /* nobody can use it */
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
