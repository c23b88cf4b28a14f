/* OrtMemoryInfo, OrtAllocator and OrtDataTransferImpl over memory.h. */
#include "ort_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

/* ---- which memory an OrtMemoryDevice means ---- */

typedef enum place_kind { PLACE_HOST, PLACE_DEVICE, PLACE_PINNED, PLACE_FOREIGN } place_kind;

typedef struct place {
  place_kind kind;
  bool emulated;
  int ordinal;
} place;

static place place_of(const OrtMemoryDevice *memory_device) {
  OrtMemoryInfoDeviceType type = ocp_ep_api->MemoryDevice_GetDeviceType(memory_device);
  if (type == OrtMemoryInfoDeviceType_CPU)
    return (place){.kind = PLACE_HOST};
  uint32_t vendor = ocp_ep_api->MemoryDevice_GetVendorId(memory_device);
  if (type != OrtMemoryInfoDeviceType_GPU || (vendor != OCP_VENDOR_NVIDIA && vendor != OCP_VENDOR_EMULATED))
    return (place){.kind = PLACE_FOREIGN};
  place result = {.emulated = vendor == OCP_VENDOR_EMULATED || vendor == ocp_vendor_id(/*emulated=*/true),
                  .ordinal = (int)ocp_ep_api->MemoryDevice_GetDeviceId(memory_device)};
  switch (ocp_ep_api->MemoryDevice_GetMemoryType(memory_device)) {
  case OrtDeviceMemoryType_DEFAULT:
    result.kind = PLACE_DEVICE;
    return result;
  case OrtDeviceMemoryType_HOST_ACCESSIBLE:
    result.kind = PLACE_PINNED;
    return result;
  default:
    return (place){.kind = PLACE_FOREIGN};
  }
}

static bool is_ours(place where) { return where.kind == PLACE_DEVICE || where.kind == PLACE_PINNED; }

static OrtStatus *failure(OrtErrorCode code, const char *text) { return ocp_api->CreateStatus(code, text); }

int ocp_fail_status(ocp_error *error, OrtStatus *status) {
  ocp_fail(error, (int)ocp_api->GetErrorCode(status), "%s", ocp_api->GetErrorMessage(status));
  ocp_api->ReleaseStatus(status);
  return error->code;
}

/* ---- OrtMemoryInfo ---- */

int ocp_ort_memory_info(bool emulated, int ordinal, OrtDeviceMemoryType type, const OrtMemoryInfo **out,
                        ocp_error *error) {
  enum { MAX_DEVICES = 64 };
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static OrtMemoryInfo *infos[2][2][MAX_DEVICES];
  bool pinned = type == OrtDeviceMemoryType_HOST_ACCESSIBLE;
  *out = NULL;
  if (ordinal < 0 || ordinal >= MAX_DEVICES)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "there is no CUDA device %d", ordinal);
  static const char *const names[2][2] = {{"Cuda", "CudaPinned"}, {"CudaEmulated", "CudaEmulatedPinned"}};
  OrtStatus *status = NULL;
  pthread_mutex_lock(&lock);
  OrtMemoryInfo **info = &infos[emulated][pinned][ordinal];
  if (!*info)
    status = ocp_api->CreateMemoryInfo_V2(names[emulated][pinned], OrtMemoryInfoDeviceType_GPU, ocp_vendor_id(emulated),
                                          ordinal, type,
                                          /*alignment=*/0, OrtDeviceAllocator, info);
  *out = *info;
  pthread_mutex_unlock(&lock);
  return status ? ocp_fail_status(error, status) : ORT_OK;
}

/* ---- OrtAllocator ---- */

/* One object per memory type and user; the device is opened by the first allocation, so that registering the library
 * does not make a CUDA context on every GPU. */
typedef struct ort_allocator {
  OrtAllocator ort;
  const OrtMemoryInfo *info;
  place where;
  _Atomic(ocp_device *) device;
} ort_allocator;

static atomic_int num_allocators;

static int memory_of(const ort_allocator *allocator) {
  return allocator->where.kind == PLACE_DEVICE ? OCP_DEVICE_MEMORY : OCP_PINNED_MEMORY;
}

static void log_error(const char *text) {
  if (!ocp_logger)
    return;
  OrtStatus *status =
      ocp_api->Logger_LogMessage(ocp_logger, ORT_LOGGING_LEVEL_ERROR, text, __FILE__, __LINE__, "Alloc");
  if (status)
    ocp_api->ReleaseStatus(status);
}

/* An allocator cannot say why it gives nothing. The log does, and where the tensor was meant for a kernel of ours the
 * error of the Run, too. */
static _Thread_local ocp_error last_failure;

const char *ocp_ort_allocation_failure(void) { return last_failure.text; }

static void *allocate(ort_allocator *allocator, size_t size, ocp_stream *stream) {
  ocp_error error = {0};
  uint64_t address = 0;
  ocp_device *device = atomic_load_explicit(&allocator->device, memory_order_acquire);
  if (!device) {
    device = ocp_device_open(allocator->where.emulated, allocator->where.ordinal, &error);
    atomic_store_explicit(&allocator->device, device, memory_order_release);
  }
  if (stream && stream->device != device)
    stream = NULL;
  if (!device || ocp_pool_alloc(device, memory_of(allocator), size, stream, &address, &error) != ORT_OK) {
    last_failure = error;
    log_error(error.text);
  }
  return (void *)(uintptr_t)address;
}

static void *allocator_alloc(OrtAllocator *this_, size_t size) {
  return allocate((ort_allocator *)(void *)this_, size, NULL);
}

static void *allocator_alloc_on_stream(OrtAllocator *this_, size_t size, OrtSyncStream *stream) {
  return allocate((ort_allocator *)(void *)this_, size, ocp_ort_stream(stream));
}

static void allocator_free(OrtAllocator *this_, void *address) {
  ort_allocator *allocator = (ort_allocator *)(void *)this_;
  ocp_device *device = atomic_load_explicit(&allocator->device, memory_order_acquire);
  /* ORT frees what one allocator object gave through another one of the same memory, hence no assertion on device. */
  if (!device) {
    ocp_error ignored = {0};
    device = ocp_device_open(allocator->where.emulated, allocator->where.ordinal, &ignored);
  }
  /* Without a stream: ORT frees when the last user is enqueued, and does not say on which streams. */
  if (device && !ocp_pool_free(device, memory_of(allocator), (uint64_t)(uintptr_t)address, NULL))
    log_error("Free of an address that this allocator did not hand out, or that was freed before");
}

static const OrtMemoryInfo *allocator_info(const OrtAllocator *this_) {
  return ((const ort_allocator *)(const void *)this_)->info;
}

static OrtStatus *allocator_get_stats(const OrtAllocator *this_, OrtKeyValuePairs **out) {
  const ort_allocator *allocator = (const ort_allocator *)(const void *)this_;
  *out = NULL;
  ocp_memory_stats stats = {0};
  size_t limit = 0;
  ocp_device *device = atomic_load_explicit(&allocator->device, memory_order_acquire);
  if (device) {
    ocp_pool_stats(device, memory_of(allocator), &stats);
    if (allocator->where.kind == PLACE_DEVICE)
      device->driver->DeviceTotalMem(&limit, device->device);
  }
  const struct {
    const char *key;
    int64_t value;
  } entries[] = {
      {"Limit", (int64_t)limit},
      {"InUse", stats.in_use},
      {"TotalAllocated", stats.in_use + stats.cached},
      {"MaxInUse", stats.max_in_use},
      {"NumAllocs", stats.num_allocs},
      {"NumReserves", 0},
      {"NumArenaExtensions", stats.num_driver_allocs},
      {"NumArenaShrinkages", stats.num_trims},
      {"MaxAllocSize", stats.max_alloc_size},
  };
  ocp_api->CreateKeyValuePairs(out);
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)entries[i].value);
    ocp_api->AddKeyValuePair(*out, entries[i].key, text);
  }
  return NULL;
}

OrtStatus *ocp_ort_create_allocator(OrtEpFactory *factory, const OrtMemoryInfo *memory_info,
                                    const OrtKeyValuePairs *options, OrtAllocator **out) {
  (void)factory;
  (void)options;
  *out = NULL;
  place where = place_of(ocp_ep_api->MemoryInfo_GetMemoryDevice(memory_info));
  if (!is_ours(where))
    return failure(ORT_INVALID_ARGUMENT, OCP_EP_NAME " has no allocator for this memory");
  ort_allocator *allocator = calloc(1, sizeof *allocator);
  if (!allocator)
    return failure(ORT_FAIL, "out of host memory");
  ocp_error error = {0};
  if (ocp_ort_memory_info(where.emulated, where.ordinal,
                          where.kind == PLACE_PINNED ? OrtDeviceMemoryType_HOST_ACCESSIBLE
                                                     : OrtDeviceMemoryType_DEFAULT,
                          &allocator->info, &error) != ORT_OK) {
    free(allocator);
    return ocp_status(&error);
  }
  allocator->where = where;
  allocator->ort = (OrtAllocator){
      .version = ocp_api_version,
      .Alloc = allocator_alloc,
      .Free = allocator_free,
      .Info = allocator_info,
      .Reserve = allocator_alloc,
      .GetStats = allocator_get_stats,
      /* Null for pinned memory: the host writes it at once. */
      .AllocOnStream = where.kind == PLACE_DEVICE ? allocator_alloc_on_stream : NULL,
  };
  atomic_fetch_add(&num_allocators, 1);
  *out = &allocator->ort;
  return NULL;
}

void ocp_ort_release_allocator(OrtEpFactory *factory, OrtAllocator *allocator) {
  (void)factory;
  if (!allocator)
    return;
  free(allocator);
  /* ORT holds one for each memory from registering to unregistering. */
  if (atomic_fetch_sub(&num_allocators, 1) == 1)
    ocp_trim_all();
}

/* ---- copies ---- */

static int enqueue_copy(ocp_stream *stream, void *dst, bool dst_on_device, const void *src, bool src_on_device,
                        size_t bytes, ocp_error *error) {
  const ocp_driver *driver = stream->device->driver;
  CUdeviceptr dst_address = (CUdeviceptr)(uintptr_t)dst, src_address = (CUdeviceptr)(uintptr_t)src;
  CUresult result;
  const char *what;
  if (!src_on_device) {
    what = "cuMemcpyHtoDAsync";
    result = driver->MemcpyHtoDAsync(dst_address, src, bytes, stream->handle);
    ocp_count(OCP_COPIES_H2D, 1);
  } else if (!dst_on_device) {
    what = "cuMemcpyDtoHAsync";
    result = driver->MemcpyDtoHAsync(dst, src_address, bytes, stream->handle);
    ocp_count(OCP_COPIES_D2H, 1);
  } else {
    what = "cuMemcpyDtoDAsync";
    result = driver->MemcpyDtoDAsync(dst_address, src_address, bytes, stream->handle);
    ocp_count(OCP_COPIES_D2D, 1);
  }
  ocp_stream_enqueued(stream);
  return result == CUDA_SUCCESS ? ORT_OK : ocp_device_fail(stream->device, result, what, error);
}

int ocp_ort_copy(ocp_device *device, void *dst, bool dst_on_device, const void *src, bool src_on_device, size_t bytes,
                 ocp_stream *stream, ocp_error *error) {
  if (bytes == 0)
    return ORT_OK;
  if (ocp_device_enter(stream ? stream->device : device, error) != ORT_OK)
    return error->code;
  if (!dst_on_device && !src_on_device) {
    if (!stream || ocp_stream_synchronize(stream, error) == ORT_OK)
      memcpy(dst, src, bytes);
    return error->code;
  }
  if (stream)
    return enqueue_copy(stream, dst, dst_on_device, src, src_on_device, bytes, error);
  if (ocp_stream_borrow(device, &stream, error) != ORT_OK)
    return error->code;
  if (enqueue_copy(stream, dst, dst_on_device, src, src_on_device, bytes, error) == ORT_OK)
    ocp_stream_synchronize(stream, error);
  ocp_stream_return(stream);
  return error->code;
}

/* ---- OrtDataTransferImpl ---- */

static bool can_copy(const OrtDataTransferImpl *this_ptr, const OrtMemoryDevice *src_memory_device,
                     const OrtMemoryDevice *dst_memory_device) {
  (void)this_ptr;
  place src = place_of(src_memory_device), dst = place_of(dst_memory_device);
  if (src.kind == PLACE_FOREIGN || dst.kind == PLACE_FOREIGN || (!is_ours(src) && !is_ours(dst)))
    return false;
  return !is_ours(src) || !is_ours(dst) || src.emulated == dst.emulated;
}

ocp_device *ocp_ort_copying_device(const OrtValue *src, const OrtValue *dst, ocp_error *error) {
  place from = place_of(ocp_ep_api->Value_GetMemoryDevice(src)), to = place_of(ocp_ep_api->Value_GetMemoryDevice(dst));
  place ours = to.kind == PLACE_DEVICE ? to : from.kind == PLACE_DEVICE || !is_ours(to) ? from : to;
  if (is_ours(ours) && from.kind != PLACE_FOREIGN && to.kind != PLACE_FOREIGN)
    return ocp_device_open(ours.emulated, ours.ordinal, error);
  ocp_fail(error, ORT_INVALID_ARGUMENT, OCP_EP_NAME " cannot copy between these devices");
  return NULL;
}

int ocp_ort_copy_tensor(const OrtValue *src, OrtValue *dst, ocp_stream *stream, ocp_error *error) {
  size_t src_bytes = 0, dst_bytes = 0;
  const void *src_data = NULL;
  void *dst_data = NULL;
  OrtStatus *status = NULL;
  if ((status = ocp_api->GetTensorSizeInBytes(src, &src_bytes)) ||
      (status = ocp_api->GetTensorSizeInBytes(dst, &dst_bytes)) || (status = ocp_api->GetTensorData(src, &src_data)) ||
      (status = ocp_api->GetTensorMutableData(dst, &dst_data)))
    return ocp_fail_status(error, status);
  if (src_bytes != dst_bytes)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "cannot copy a tensor of %zu bytes into one of %zu", src_bytes,
                    dst_bytes);
  if (dst_bytes && (!src_data || !dst_data))
    return ocp_fail(error, ORT_EP_FAIL, "cannot copy a tensor without memory: %s", ocp_ort_allocation_failure());
  ocp_device *device = ocp_ort_copying_device(src, dst, error);
  if (!device)
    return error->code;
  bool from_device = place_of(ocp_ep_api->Value_GetMemoryDevice(src)).kind == PLACE_DEVICE;
  bool to_device = place_of(ocp_ep_api->Value_GetMemoryDevice(dst)).kind == PLACE_DEVICE;
  return ocp_ort_copy(device, dst_data, to_device, src_data, from_device, src_bytes, stream, error);
}

static OrtStatus *copy_tensors(OrtDataTransferImpl *this_ptr, const OrtValue **src_tensors, OrtValue **dst_tensors,
                               OrtSyncStream **streams, size_t num_tensors) {
  (void)this_ptr;
  ocp_error error = {0};
  for (size_t i = 0; i < num_tensors; i++)
    if (ocp_ort_copy_tensor(src_tensors[i], dst_tensors[i], ocp_ort_stream(streams ? streams[i] : NULL), &error) !=
        ORT_OK)
      break;
  return ocp_status(&error);
}

static void release_data_transfer(OrtDataTransferImpl *this_ptr) { free(this_ptr); }

OrtStatus *ocp_ort_create_data_transfer(OrtEpFactory *factory, OrtDataTransferImpl **out) {
  (void)factory;
  *out = calloc(1, sizeof **out);
  if (!*out)
    return failure(ORT_FAIL, "out of host memory");
  **out = (OrtDataTransferImpl){.ort_version_supported = ocp_api_version,
                                .Release = release_data_transfer,
                                .CanCopy = can_copy,
                                .CopyTensors = copy_tensors};
  return NULL;
}

/* ---- streams by OrtMemoryDevice; what they do is in ort_stream.c ---- */

bool ocp_ort_is_stream_aware(const OrtEpFactory *factory) {
  (void)factory;
  return true;
}

OrtStatus *ocp_ort_create_sync_stream(OrtEpFactory *factory, const OrtMemoryDevice *memory_device,
                                      const OrtKeyValuePairs *options, OrtSyncStreamImpl **out) {
  (void)factory;
  (void)options;
  *out = NULL;
  place where = place_of(memory_device);
  if (where.kind != PLACE_DEVICE)
    return failure(ORT_INVALID_ARGUMENT, OCP_EP_NAME " has no streams for this memory");
  ocp_error error = {0};
  ocp_stream *stream = NULL;
  ocp_device *device = ocp_device_open(where.emulated, where.ordinal, &error);
  if (device && ocp_stream_create(device, &stream, &error) == ORT_OK)
    *out = &stream->ort;
  return ocp_status(&error);
}

OrtStatus *ocp_ort_synchronize_device(ocp_device *device) {
  ocp_error error = {0};
  ocp_device_synchronize(device, &error);
  return ocp_status(&error);
}
