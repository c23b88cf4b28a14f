#include "device/wait.h"

#include "device/order.h"
#include "device/pool.h"
#include "device/run_memory.h"
#include "device/stream.h"

static bool is_busy(const ocp_stream *stream) { return !ocp_stream_is_idle(stream); }

/* Returns the next stream after `stream` (NULL: from the first on) for which `holds` is true. The caller holds
 * streams_lock, so the result stays alive. */
static ocp_stream *next_stream(ocp_pool *pool, const ocp_stream *stream, bool (*holds)(const ocp_stream *)) {
  pthread_mutex_lock(&pool->lock);
  ocp_stream *next = stream ? stream->priv->next : pool->streams;
  while (next && !holds(next))
    next = next->priv->next;
  pthread_mutex_unlock(&pool->lock);
  return next;
}

/* Takes a shared turn (stream.h), unless the stream is being captured: a query would invalidate the capture. */
static bool try_turn(ocp_stream *stream) {
  if (!ocp_stream_try_turn(stream))
    return false;
  if (stream->owned || !ocp_stream_is_captured(stream))
    return true;
  ocp_stream_end_turn(stream);
  return false;
}

void ocp_pool_poll(ocp_device *device) {
  if (ocp_run_memory_is_captured())
    return; /* a query would invalidate the capture */
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->streams_lock);
  for (ocp_stream *stream = NULL; (stream = next_stream(pool, stream, is_busy));) {
    if (!try_turn(stream))
      continue;
    ocp_stream_query(stream);
    ocp_stream_end_turn(stream);
  }
  pthread_mutex_unlock(&pool->streams_lock);
}

/* Waits for the streams for which `holds` is true, except for streams that are being captured: they execute nothing. */
static int synchronize_streams(ocp_device *device, bool (*holds)(const ocp_stream *), ocp_error *error) {
  ocp_pool *pool = device->pool;
  int code = ORT_OK;
  pthread_mutex_lock(&pool->streams_lock);
  for (ocp_stream *stream = NULL; code == ORT_OK && (stream = next_stream(pool, stream, holds));) {
    if (!try_turn(stream))
      continue;
    code = ocp_stream_wait(stream, error);
    ocp_stream_end_turn(stream);
  }
  pthread_mutex_unlock(&pool->streams_lock);
  return code;
}

int ocp_pool_synchronize(ocp_device *device, ocp_error *error) { return synchronize_streams(device, is_busy, error); }

int ocp_device_synchronize(ocp_device *device, ocp_error *error) {
  OCP_STAY stay = ocp_device_enter(device, error);
  return stay.entered ? ocp_pool_synchronize(device, error) : error->code;
}

int ocp_device_settle(ocp_device *device, ocp_error *error) {
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered)
    return error->code;
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->lock); /* in the common case no stream has unfinished work */
  const ocp_stream *stream = pool->streams;
  while (stream && !ocp_stream_is_known_to_be_busy(stream))
    stream = stream->priv->next;
  pthread_mutex_unlock(&pool->lock);
  return stream ? synchronize_streams(device, ocp_stream_is_known_to_be_busy, error) : ORT_OK;
}
