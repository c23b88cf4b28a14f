#include "ort/external/imported_memory.h"

#include <unistd.h>

#include "base/dtype.h"
#include "base/host.h"
#include "device/release.h"
#include "ort/data/allocator.h"
#include "ort/external/descriptor.h"
#include "ort/external/imported.h"

#define WHAT "external memory"

typedef struct imported_memory {
  OrtExternalMemoryHandle ort; /* first member: ORT's view */
  ocp_imported imported;
  OrtAllocator deleter; /* ORT "frees" a tensor through it */
  const OrtMemoryInfo *info;
  CUexternalMemory memory;
  CUdeviceptr address; /* of the range that the application can use */
  uint64_t bytes;
} imported_memory;

static imported_memory *memory_of(ocp_imported *imported) {
  return (imported_memory *)(void *)((char *)imported - offsetof(imported_memory, imported));
}

static void destroy(ocp_imported *imported) {
  const imported_memory *memory = memory_of(imported);
  const ocp_driver *driver = imported->device->driver;
  ocp_device_released(imported->device, driver->MemFree(memory->address), "cuMemFree");
  ocp_device_released(imported->device, driver->DestroyExternalMemory(memory->memory), "cuDestroyExternalMemory");
}

static ocp_imported_kind kind = {
    .name = WHAT,
    .bytes = sizeof(imported_memory),
    .offset = offsetof(imported_memory, imported),
    .destroy = destroy,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

/* ---- the deleter of tensors ---- */

static imported_memory *of_deleter(const OrtAllocator *deleter) {
  return (imported_memory *)(void *)((char *)(uintptr_t)deleter - offsetof(imported_memory, deleter));
}

static void *deleter_alloc(OrtAllocator *this_, size_t size) {
  (void)this_, (void)size;
  return NULL;
}

static void deleter_free(OrtAllocator *this_, void *address) {
  (void)address;
  ocp_imported_end_use(&of_deleter(this_)->imported);
}

static const OrtMemoryInfo *deleter_info(const OrtAllocator *this_) { return of_deleter(this_)->info; }

/* ---- import ---- */

static int check(const OrtExternalMemoryDescriptor *desc, ocp_error *error) {
  if (!desc)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, WHAT ": the descriptor is NULL");
  if (ocp_check_descriptor_version(desc->version, WHAT, error) != ORT_OK)
    return error->code;
  if (desc->handle_type != ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD)
    return ocp_fail(error, ORT_NOT_IMPLEMENTED,
                    WHAT ": handle type %d is not supported on Linux, expected "
                         "ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD (3)",
                    (int)desc->handle_type);
  if (desc->offset_bytes >= desc->size_bytes)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    WHAT ": offset_bytes is %zu and size_bytes is %zu, the size of the whole allocation; expected an "
                         "offset below the size",
                    desc->offset_bytes, desc->size_bytes);
  return ORT_OK;
}

/* Imports and maps the memory; the caller has entered the device. On success the driver owns the descriptor. */
static int map(imported_memory *memory, const OrtExternalMemoryDescriptor *desc, int fd, ocp_error *error) {
  ocp_device *device = memory->imported.device;
  const CUDA_EXTERNAL_MEMORY_HANDLE_DESC import = {
      .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle = {.fd = fd}, .size = desc->size_bytes};
  CUresult result = device->driver->ImportExternalMemory(&memory->memory, &import);
  if (result != CUDA_SUCCESS) {
    close(fd);
    return ocp_device_fail(device, result, WHAT ": cuImportExternalMemory", error);
  }
  memory->bytes = desc->size_bytes - desc->offset_bytes;
  const CUDA_EXTERNAL_MEMORY_BUFFER_DESC range = {.offset = desc->offset_bytes, .size = memory->bytes};
  result = device->driver->ExternalMemoryGetMappedBuffer(&memory->address, memory->memory, &range);
  if (result == CUDA_SUCCESS)
    return ORT_OK;
  ocp_device_fail(device, result, WHAT ": cuExternalMemoryGetMappedBuffer", error);
  ocp_device_released(device, device->driver->DestroyExternalMemory(memory->memory), "cuDestroyExternalMemory");
  return error->code;
}

static void release(OrtExternalMemoryHandle *handle) { ocp_release_imported_memory(handle); }

int ocp_import_memory(ocp_device *device, const OrtEpDevice *ep_device, const OrtExternalMemoryDescriptor *desc,
                      OrtExternalMemoryHandle **out, ocp_error *error) {
  const OrtMemoryInfo *info = NULL;
  int fd = -1;
  if (check(desc, error) != ORT_OK ||
      ocp_ort_memory_info(device->emulated, device->ordinal, OCP_INFO_DEVICE, &info, error) != ORT_OK)
    return error->code;
  OCP_STAY stay = ocp_device_enter(device, error);
  ocp_imported *imported = stay.entered ? ocp_imported_make(&kind, device, error) : NULL;
  if (!imported)
    return error->code;
  imported_memory *memory = memory_of(imported);
  if (ocp_duplicate_descriptor(desc->native_handle, WHAT, &fd, error) != ORT_OK ||
      map(memory, desc, fd, error) != ORT_OK) {
    ocp_imported_discard(imported);
    return error->code;
  }
  ocp_close_descriptor(desc->native_handle);
  memory->info = info;
  memory->deleter =
      (OrtAllocator){.version = ocp_api_version, .Alloc = deleter_alloc, .Free = deleter_free, .Info = deleter_info};
  memory->ort = (OrtExternalMemoryHandle){
      .version = ocp_api_version, .ep_device = ep_device, .descriptor = *desc, .Release = release};
  memory->ort.descriptor.native_handle = NULL; /* closed */
  ocp_imported_hold(imported);
  *out = &memory->ort;
  return ORT_OK;
}

void ocp_release_imported_memory(OrtExternalMemoryHandle *handle) { ocp_imported_release(&kind, handle); }

/* ---- tensors ---- */

/* Determines the bytes of the tensor. */
static int size_of(const OrtExternalTensorDescriptor *desc, uint64_t *bytes, ocp_error *error) {
  const uint32_t bits = ocp_dtype_bits((uint32_t)desc->element_type);
  uint64_t count = 1;
  bool overflows = false;
  if (!bits)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "external tensor: element type %d has no fixed size, expected a numeric or bool type",
                    (int)desc->element_type);
  if (desc->rank && !desc->shape)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "external tensor: shape is NULL, expected %zu dimensions", desc->rank);
  for (size_t i = 0; i < desc->rank; i++) {
    if (desc->shape[i] < 0)
      return ocp_fail(error, ORT_INVALID_ARGUMENT,
                      "external tensor: dimension %zu of the shape is %lld, expected 0 or more", i,
                      (long long)desc->shape[i]);
    overflows |= __builtin_mul_overflow(count, (uint64_t)desc->shape[i], &count);
  }
  if (overflows || __builtin_mul_overflow(count, bits, bytes) || *bytes > UINT64_MAX - 7)
    return ocp_fail(error, ORT_INVALID_ARGUMENT,
                    "external tensor: the elements of the shape have 2^64 bits or more, expected fewer");
  *bytes = (*bytes + 7) / 8;
  return ORT_OK;
}

/* Checks that the tensor lies in the memory, at a multiple of its element size. */
static int check_place(const imported_memory *memory, const OrtExternalTensorDescriptor *desc, uint64_t bytes,
                       ocp_error *error) {
  const uint32_t bits = ocp_dtype_bits((uint32_t)desc->element_type), element = (bits + 7) / 8;
  if (desc->offset_bytes > memory->bytes || bytes > memory->bytes - desc->offset_bytes)
    return ocp_fail(
        error, ORT_INVALID_ARGUMENT,
        "external tensor: %llu bytes at offset_bytes %zu do not fit into the imported memory, which has %llu "
        "bytes after the offset_bytes of its own descriptor",
        (unsigned long long)bytes, desc->offset_bytes, (unsigned long long)memory->bytes);
  if ((memory->address + desc->offset_bytes) % element)
    return ocp_fail(
        error, ORT_INVALID_ARGUMENT,
        "external tensor: got offset_bytes %zu of the tensor and %zu of the imported memory, expected a sum "
        "that is a multiple of the element size, %u bytes",
        desc->offset_bytes, memory->ort.descriptor.offset_bytes, element);
  return ORT_OK;
}

int ocp_make_external_tensor(ocp_device *device, const OrtExternalMemoryHandle *handle,
                             const OrtExternalTensorDescriptor *desc, OrtValue **out, ocp_error *error) {
  uint64_t bytes = 0;
  if (!desc)
    return ocp_fail(error, ORT_INVALID_ARGUMENT, "external tensor: the descriptor is NULL");
  if (ocp_check_descriptor_version(desc->version, "external tensor", error) != ORT_OK ||
      size_of(desc, &bytes, error) != ORT_OK)
    return error->code;
  ocp_imported *imported = ocp_imported_use(&kind, handle, device, error);
  if (!imported)
    return error->code;
  imported_memory *memory = memory_of(imported);
  if (check_place(memory, desc, bytes, error) == ORT_OK) {
    OrtStatus *status = ocp_api->CreateTensorWithDataAndDeleterAsOrtValue(
        &memory->deleter, (void *)(uintptr_t)(memory->address + desc->offset_bytes), bytes, desc->shape, desc->rank,
        desc->element_type, out);
    if (!status)
      return ORT_OK; /* the tensor is a user of the memory now */
    ocp_fail_status(error, status);
  }
  ocp_imported_end_use(imported);
  return error->code;
}
