/* The weight store: copies of constants in device or pinned host memory, keyed by device, memory and content hash,
 * shared by all clusters of the process. States (weights that Runs write) and weights that a precomputation writes are
 * not shared: each has one owner. */
#include "device/memory/weights.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/counters.h"
#include "device/memory/memory.h"
#include "device/order.h"
#include "device/stream.h"

typedef struct content_hash {
  uint64_t low, high;
} content_hash;

/* A weight. A shared one belongs to all clusters that acquired the same content; the last release frees it. */
struct ocp_weight {
  ocp_weight *next; /* next weight of the bucket */
  ocp_device *device;
  ocp_weight_memory memory;
  content_hash hash;
  size_t bytes;
  CUdeviceptr address;
  uint32_t references;
  bool is_shared; /* true: found by its content, in a bucket */
  enum { UPLOADING, READY, FAILED } state;
};

enum { BUCKETS = 1024 };
static ocp_weight *buckets[BUCKETS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* never held while hashing or copying */
static pthread_cond_t uploaded = PTHREAD_COND_INITIALIZER;

/* ---- content hash: SipHash-1-3 with 128 bits (Aumasson and Bernstein). Its key is random in each process, so that no
 * model can be crafted whose weights collide with those of another session. ---- */

static uint64_t hash_key[2];

static void make_hash_key(void) {
  unsigned char *key = (unsigned char *)hash_key;
  for (size_t done = 0; done < sizeof hash_key;) {
    const ssize_t got = getrandom(key + done, sizeof hash_key - done, 0);
    if (got < 0 && errno != EINTR)
      abort(); /* cannot happen: without flags getrandom fails only if a signal interrupts it */
    done += got > 0 ? (size_t)got : 0;
  }
}

static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static void sip_round(uint64_t v[4]) {
  v[0] += v[1];
  v[2] += v[3];
  v[1] = rotate(v[1], 13) ^ v[0];
  v[3] = rotate(v[3], 16) ^ v[2];
  v[0] = rotate(v[0], 32);
  v[2] += v[1];
  v[0] += v[3];
  v[1] = rotate(v[1], 17) ^ v[2];
  v[3] = rotate(v[3], 21) ^ v[0];
  v[2] = rotate(v[2], 32);
}

static void absorb(uint64_t v[4], uint64_t word) {
  v[3] ^= word;
  sip_round(v);
  v[0] ^= word;
}

static content_hash hash_content(const void *data, size_t bytes) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_hash_key);
  uint64_t v[4] = {hash_key[0] ^ UINT64_C(0x736f6d6570736575), hash_key[1] ^ UINT64_C(0x646f72616e646f6d) ^ 0xee,
                   hash_key[0] ^ UINT64_C(0x6c7967656e657261), hash_key[1] ^ UINT64_C(0x7465646279746573)};
  const unsigned char *from = data;
  uint64_t word;
  for (size_t i = 0; i < bytes / 8; i++, from += 8) {
    memcpy(&word, from, 8);
    absorb(v, word);
  }
  word = 0;
  if (bytes % 8)
    memcpy(&word, from, bytes % 8);
  absorb(v, word | (uint64_t)bytes << 56);
  content_hash hash;
  v[2] ^= 0xee;
  for (int i = 0; i < 3; i++)
    sip_round(v);
  hash.low = v[0] ^ v[1] ^ v[2] ^ v[3];
  v[1] ^= 0xdd;
  for (int i = 0; i < 3; i++)
    sip_round(v);
  hash.high = v[0] ^ v[1] ^ v[2] ^ v[3];
  return hash;
}

/* ---- the store ---- */

static ocp_weight **bucket_of(content_hash hash) { return &buckets[hash.low % BUCKETS]; }

/* Finds or adds the entry, with a reference for the caller; *is_new: the caller has to upload it. The mutex is held. */
static ocp_weight *find_or_insert(ocp_device *device, ocp_weight_memory memory, content_hash hash, size_t bytes,
                                  bool *is_new) {
  ocp_weight **bucket = bucket_of(hash);
  *is_new = false;
  for (ocp_weight *w = *bucket; w; w = w->next)
    if (w->device == device && w->memory == memory && w->bytes == bytes && w->hash.low == hash.low &&
        w->hash.high == hash.high && w->state != FAILED) {
      w->references++;
      return w;
    }
  ocp_weight *weight = calloc(1, sizeof *weight);
  if (!weight)
    return NULL;
  *weight = (ocp_weight){.next = *bucket,
                         .device = device,
                         .memory = memory,
                         .hash = hash,
                         .bytes = bytes,
                         .references = 1,
                         .is_shared = true};
  *bucket = weight;
  *is_new = true;
  return weight;
}

/* Drops a reference; returns the entry when it was the last one and the caller must free it. The mutex is held. */
static ocp_weight *drop(ocp_weight *weight) {
  if (--weight->references)
    return NULL;
  if (!weight->is_shared)
    return weight;
  ocp_weight **link = bucket_of(weight->hash);
  while (*link != weight)
    link = &(*link)->next;
  *link = weight->next;
  return weight;
}

/* Waits for a copy that the driver call `what` enqueued with `result`, and gives the borrowed stream back. */
static int end_copy(ocp_stream *stream, CUresult result, const char *what, ocp_error *error) {
  ocp_device *device = stream->device;
  ocp_stream_enqueued(stream); /* the memory must not be freed before the copy ends, even if waiting fails */
  int code = ocp_stream_synchronize(stream, error);
  if (result != CUDA_SUCCESS)
    code = ocp_device_fail(device, result, what, error);
  ocp_stream_return(stream);
  return code;
}

static int copy_up(const ocp_weight *weight, const void *data, ocp_error *error) {
  ocp_device *device = weight->device;
  ocp_stream *stream;
  if (ocp_stream_borrow(device, &stream, error) != ORT_OK)
    return error->code;
  const CUresult result = device->driver->MemcpyHtoDAsync(weight->address, data, weight->bytes, stream->handle);
  ocp_count(OCP_COPIES_H2D, 1);
  return end_copy(stream, result, "uploading a weight: cuMemcpyHtoDAsync", error);
}

static int reserve(ocp_weight *weight, ocp_error *error) {
  const int arena = weight->memory == OCP_WEIGHT_ON_HOST ? OCP_PINNED_MEMORY : OCP_DEVICE_MEMORY;
  return ocp_pool_reserve(weight->device, arena, weight->bytes, &weight->address, error);
}

static void count_weight(const ocp_weight *weight, bool is_new) {
  const int64_t bytes = (int64_t)weight->bytes;
  ocp_count(weight->memory == OCP_WEIGHT_ON_HOST ? OCP_HOST_WEIGHT_BYTES : OCP_WEIGHT_BYTES, is_new ? bytes : -bytes);
}

/* Returns the host's pointer to a weight in host memory. */
static void *host_pointer(const ocp_weight *weight) {
  void *pointer;
  memcpy(&pointer, &weight->address, sizeof pointer);
  return pointer;
}

static int upload(ocp_weight *weight, const void *data, ocp_error *error) {
  ocp_device *device = weight->device;
  if (weight->memory == OCP_WEIGHT_ON_HOST) {
    if (reserve(weight, error) != ORT_OK)
      return error->code;
    if (weight->bytes)
      memcpy(host_pointer(weight), data, weight->bytes);
    count_weight(weight, true);
    return ORT_OK;
  }
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered || reserve(weight, error) != ORT_OK)
    return error->code;
  const int code = weight->bytes && data ? copy_up(weight, data, error) : ORT_OK;
  if (code == ORT_OK)
    count_weight(weight, true);
  else
    ocp_device_free(device, weight->address, NULL);
  return code;
}

int ocp_weight_acquire(ocp_device *device, ocp_weight_memory memory, const void *data, size_t bytes, ocp_weight **out,
                       ocp_error *error) {
  const content_hash hash = hash_content(data, bytes);
  for (;;) {
    bool is_new;
    pthread_mutex_lock(&mutex);
    ocp_weight *weight = find_or_insert(device, memory, hash, bytes, &is_new);
    while (weight && !is_new && weight->state == UPLOADING)
      pthread_cond_wait(&uploaded, &mutex);
    const bool failed = weight && weight->state == FAILED;
    ocp_weight *const unused = failed ? drop(weight) : NULL;
    pthread_mutex_unlock(&mutex);
    free(unused);
    if (!weight)
      return ocp_fail_memory(error);
    if (failed)
      continue; /* the thread that uploaded the weight failed; this thread uploads it, or gets the error */
    *out = weight;
    if (!is_new)
      return ORT_OK;
    const int code = upload(weight, data, error);
    pthread_mutex_lock(&mutex);
    weight->state = code == ORT_OK ? READY : FAILED;
    ocp_weight *const gone = code == ORT_OK ? NULL : drop(weight);
    pthread_cond_broadcast(&uploaded);
    pthread_mutex_unlock(&mutex);
    free(gone);
    if (code != ORT_OK)
      *out = NULL;
    return code;
  }
}

int ocp_weight_create_state(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error) {
  ocp_weight *weight = calloc(1, sizeof *weight);
  if (!weight)
    return ocp_fail_memory(error);
  *weight = (ocp_weight){.device = device, .bytes = bytes, .references = 1, .state = READY};
  if (upload(weight, data, error) != ORT_OK) {
    free(weight);
    return error->code;
  }
  *out = weight;
  return ORT_OK;
}

static int copy_down(const ocp_weight *from, const ocp_weight *to, ocp_error *error) {
  ocp_device *device = from->device;
  ocp_stream *stream;
  OCP_STAY stay = ocp_device_enter(device, error);
  if (!stay.entered || ocp_stream_borrow(device, &stream, error) != ORT_OK)
    return error->code;
  const CUresult result = device->driver->MemcpyDtoHAsync(host_pointer(to), from->address, from->bytes, stream->handle);
  ocp_count(OCP_COPIES_D2H, 1);
  return end_copy(stream, result, "copying a computed weight to host memory: cuMemcpyDtoHAsync", error);
}

/* Frees the memory of a weight. Work that was enqueued before may still read it. */
static void free_memory(const ocp_weight *weight) {
  count_weight(weight, false);
  if (weight->memory == OCP_WEIGHT_ON_HOST)
    ocp_pool_free(weight->device, OCP_PINNED_MEMORY, weight->address, NULL);
  else
    ocp_device_free(weight->device, weight->address, NULL);
}

int ocp_weight_move_to_host(ocp_weight *weight, ocp_error *error) {
  ocp_weight moved = *weight;
  error->code = ORT_OK;
  moved.memory = OCP_WEIGHT_ON_HOST;
  if (reserve(&moved, error) != ORT_OK)
    return error->code;
  count_weight(&moved, true);
  if (weight->bytes && copy_down(weight, &moved, error) != ORT_OK) {
    free_memory(&moved);
    return error->code;
  }
  free_memory(weight);
  *weight = moved;
  return ORT_OK;
}

void ocp_weight_release(ocp_weight *weight) {
  if (!weight)
    return;
  pthread_mutex_lock(&mutex);
  ocp_weight *const gone = drop(weight);
  pthread_mutex_unlock(&mutex);
  if (!gone)
    return;
  free_memory(gone);
  free(gone);
}

CUdeviceptr ocp_weight_address(const ocp_weight *weight) { return weight->address; }

ocp_weight_memory ocp_weight_memory_of(const ocp_weight *weight) { return weight->memory; }

size_t ocp_weight_bytes(const ocp_weight *weight) { return weight->bytes; }
