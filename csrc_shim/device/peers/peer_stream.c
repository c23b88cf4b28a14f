#include "device/peers/peer_stream.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/counters.h"
#include "device/memory/memory.h"
#include "device/order.h"
#include "device/pool.h"
#include "device/release.h"

/* The state in slot OCP_SLOT_PEERS of a stream: its event, and its streams on other devices. */
typedef struct peers {
  ocp_device *device; /* of the stream */
  CUevent event;      /* recorded on the stream for each stream that waits for it */
  uint32_t count;
  ocp_stream *streams[OCP_MAX_DEVICES]; /* one for each other device in use */
} peers;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the slots, and the members of `peers` */

static void release(void *state) {
  peers *self = state;
  for (uint32_t i = 0; i < self->count; i++)
    ocp_stream_release(self->streams[i]);
  OCP_STAY stay = ocp_device_enter_to_release(self->device);
  if (stay.entered)
    ocp_device_released(self->device, self->device->driver->EventDestroy(self->event), "cuEventDestroy");
  free(self);
}

/* Finds or makes the stream's state; NULL with the error. The caller holds the lock, and has entered the device. */
static peers *peers_of(ocp_stream *stream, ocp_error *error) {
  ocp_stream_slot *slot = &stream->slots[OCP_SLOT_PEERS];
  peers *self = atomic_load(&slot->state);
  if (self)
    return self;
  self = calloc(1, sizeof *self);
  if (!self) {
    ocp_fail_memory(error);
    return NULL;
  }
  self->device = stream->device;
  const CUresult result = self->device->driver->EventCreate(&self->event, CU_EVENT_DISABLE_TIMING);
  if (result != CUDA_SUCCESS) {
    free(self);
    ocp_device_fail(stream->device, result, "cuEventCreate", error);
    return NULL;
  }
  slot->release = release;
  atomic_store(&slot->state, self);
  return self;
}

static int find_or_create(ocp_stream *stream, ocp_device *device, ocp_stream **out, ocp_error *error) {
  OCP_STAY stay = ocp_device_enter(stream->device, error);
  peers *self = stay.entered ? peers_of(stream, error) : NULL;
  if (!self)
    return error->code;
  for (uint32_t i = 0; i < self->count; i++)
    if (self->streams[i]->device == device) {
      *out = self->streams[i];
      return ORT_OK;
    }
  if (self->count == OCP_MAX_DEVICES)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "a Run: got more than %d devices. Pass fewer in device_ids",
                    OCP_MAX_DEVICES);
  if (ocp_stream_create(device, out, error) == ORT_OK)
    self->streams[self->count++] = *out;
  return error->code;
}

int ocp_peer_stream(ocp_stream *stream, ocp_device *device, ocp_stream **out, ocp_error *error) {
  *out = stream;
  if (stream->device == device)
    return ORT_OK;
  pthread_mutex_lock(&lock);
  const int code = find_or_create(stream, device, out, error);
  pthread_mutex_unlock(&lock);
  return code;
}

/* Records the event of `earlier`. Another thread may record the event again before `later` waits for it, which is
 * harmless: `later` then waits for more work. */
static int record(ocp_stream *earlier, CUevent *event, ocp_error *error) {
  OCP_STAY stay = ocp_device_enter(earlier->device, error);
  if (!stay.entered)
    return error->code;
  pthread_mutex_lock(&lock);
  const peers *self = peers_of(earlier, error);
  pthread_mutex_unlock(&lock);
  if (!self)
    return error->code;
  *event = self->event;
  const CUresult result = earlier->device->driver->EventRecord(*event, earlier->handle);
  return result == CUDA_SUCCESS ? ORT_OK : ocp_device_fail(earlier->device, result, "cuEventRecord", error);
}

int ocp_peer_follow(ocp_stream *later, ocp_stream *earlier, ocp_error *error) {
  CUevent event = NULL;
  const uint64_t position = ocp_stream_position(earlier);
  if (later == earlier)
    return ORT_OK;
  if (record(earlier, &event, error) != ORT_OK)
    return error->code;
  OCP_STAY stay = ocp_device_enter(later->device, error);
  if (!stay.entered)
    return error->code;
  const CUresult result = later->device->driver->StreamWaitEvent(later->handle, event, 0);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(later->device, result, "cuStreamWaitEvent", error);
  if (later->device == earlier->device)
    ocp_stream_waits(later, earlier->priv->id, position);
  ocp_stream_enqueued(later);
  return ORT_OK;
}

static int enqueue_copy(ocp_stream *to, CUdeviceptr dst, const ocp_device *from, CUdeviceptr src, size_t bytes,
                        ocp_error *error) {
  OCP_STAY stay = ocp_device_enter(to->device, error);
  if (!stay.entered)
    return error->code;
  const CUresult result =
      to->device->driver->MemcpyPeerAsync(dst, to->device->context, src, from->context, bytes, to->handle);
  if (result != CUDA_SUCCESS)
    return ocp_device_fail(to->device, result, "cuMemcpyPeerAsync", error);
  ocp_stream_enqueued(to);
  ocp_count(OCP_COPIES_PEER, 1);
  ocp_count(OCP_BYTES_PEER, (int64_t)bytes);
  return ORT_OK;
}

int ocp_peer_copy(ocp_stream *to, CUdeviceptr dst, ocp_stream *from, CUdeviceptr src, size_t bytes, ocp_error *error) {
  if (bytes == 0)
    return ORT_OK;
  if (ocp_peer_follow(to, from, error) != ORT_OK || enqueue_copy(to, dst, from->device, src, bytes, error) != ORT_OK)
    return error->code;
  if (ocp_peer_follow(from, to, error) == ORT_OK)
    return ORT_OK;
  ocp_error ignored;
  ocp_stream_synchronize(to, &ignored); /* the caller may free the source on `from` at once */
  return error->code;
}

int ocp_peer_synchronize(ocp_stream *stream, ocp_error *error) {
  if (!atomic_load_explicit(&stream->slots[OCP_SLOT_PEERS].state, memory_order_acquire))
    return ORT_OK;
  ocp_stream *streams[OCP_MAX_DEVICES];
  pthread_mutex_lock(&lock);
  const peers *self = stream->slots[OCP_SLOT_PEERS].state;
  const uint32_t count = self->count;
  for (uint32_t i = 0; i < count; i++)
    streams[i] = self->streams[i];
  pthread_mutex_unlock(&lock);
  for (uint32_t i = 0; i < count; i++) {
    if (ocp_stream_is_idle(streams[i]))
      continue;
    if (ocp_stream_synchronize(streams[i], error) != ORT_OK)
      return error->code;
    ocp_pool_run_ended(streams[i]->device);
  }
  return ORT_OK;
}
