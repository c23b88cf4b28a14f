#include "device/order.h"

static uint64_t load(const atomic_ullong *number) { return atomic_load_explicit(number, memory_order_acquire); }
static void store(atomic_ullong *number, uint64_t value) { atomic_store_explicit(number, value, memory_order_release); }

/* Whether this thread executes a Run. The address of this variable identifies the thread (ocp_stream_private.run). */
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

/* Marks all work of the stream up to this sequence number as finished. The caller holds the pool's lock. */
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

void ocp_stream_set_completed(ocp_stream *stream, uint64_t up_to) {
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

bool ocp_stream_comes_after(const ocp_stream *stream, uint64_t id, uint64_t up_to) {
  if (id == stream->priv->id)
    return true;
  ocp_pool *pool = stream->device->pool;
  pthread_mutex_lock(&pool->lock);
  const bool finished = ocp_pool_is_finished(pool, id, up_to, stream);
  pthread_mutex_unlock(&pool->lock);
  return finished;
}

bool ocp_stream_is_known_to_be_busy(const ocp_stream *stream) {
  const void *run = stream->priv->run;
  return !ocp_stream_is_idle(stream) && (!run || run == &in_run);
}
