#include "device/device_list.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "driver/cuda.h"
#include "driver/driver.h"
#include "driver/error.h"
#include "emulator/calls/table.h"

/* CUDA 13.0 as cuDriverGetVersion reports it. Older drivers cannot load cubins of the CUDA 13 toolkit. */
enum { LEAST_DRIVER_VERSION = 13000 };
/* Lowest major compute capability of a GPU for which the plugin's kernels compile: they use cp.async and bfloat16. */
enum { LEAST_CC_MAJOR = 8 };

static int ask(const ocp_driver *driver, CUresult result, const char *what, ocp_error *error) {
  return result == CUDA_SUCCESS ? ORT_OK : ocp_fail_cuda(error, driver, result, what);
}

static int describe(const ocp_driver *driver, ocp_device_info *info, ocp_error *error) {
  CUdevice device = 0;
  size_t bytes = 0;
  const struct {
    int attribute, *value;
  } attributes[] = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &info->cc_major},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &info->cc_minor},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &info->multiprocessors},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &info->max_shared_bytes},
  };
  if (ask(driver, driver->DeviceGet(&device, info->ordinal), "cuDeviceGet", error) ||
      ask(driver, driver->DeviceGetName(info->name, sizeof info->name, device), "cuDeviceGetName", error) ||
      ask(driver, driver->DeviceTotalMem(&bytes, device), "cuDeviceTotalMem", error) ||
      (!info->emulated && ask(driver, driver->DeviceGetPCIBusId(info->pci_bus_id, sizeof info->pci_bus_id, device),
                              "cuDeviceGetPCIBusId", error)))
    return error->code;
  for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
    if (ask(driver, driver->DeviceGetAttribute(attributes[i].value, attributes[i].attribute, device),
            "cuDeviceGetAttribute", error))
      return error->code;
  info->memory_bytes = bytes;
  for (char *c = info->pci_bus_id; *c; c++)
    *c = (char)tolower((unsigned char)*c);
  return ORT_OK;
}

int ocp_list_devices(int emulated, ocp_device_info *infos, uint32_t room, uint32_t *count, ocp_error *error) {
  const char *why = "no CUDA driver";
  const ocp_driver *driver = emulated ? ocp_driver_emulator() : ocp_driver_cuda(&why);
  int version = 0, found = 0;
  *count = 0;
  if (!driver)
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s", why);
  if (ask(driver, driver->Init(0), "cuInit", error) ||
      ask(driver, driver->DriverGetVersion(&version), "cuDriverGetVersion", error))
    return error->code;
  if (version < LEAST_DRIVER_VERSION)
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION,
                    "the NVIDIA driver supports CUDA %d.%d, expected 13.0 or newer. Install driver R580 or newer",
                    version / 1000, version % 1000 / 10);
  if (ask(driver, driver->DeviceGetCount(&found), "cuDeviceGetCount", error))
    return error->code;
  uint32_t kept = 0;
  for (int i = 0; i < found; i++) {
    ocp_device_info info = {.emulated = emulated != 0, .ordinal = i, .driver_version = version};
    if (describe(driver, &info, error) != ORT_OK)
      return error->code;
    if (info.cc_major < LEAST_CC_MAJOR) {
      const ocp_error others = *error;
      ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%.600s%sGPU %d (%s) has compute capability %d.%d, expected %d.0 or newer",
               others.text, others.text[0] ? "; " : "", i, info.name, info.cc_major, info.cc_minor, LEAST_CC_MAJOR);
      continue;
    }
    if (kept < room)
      infos[kept] = info;
    kept++;
  }
  *count = kept;
  if (kept > 0)
    error->code = ORT_OK;
  return error->code;
}

static void add(ocp_device_metadata **entry, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void add(ocp_device_metadata **entry, const char *key, const char *format, ...) {
  va_list values;
  va_start(values, format);
  (*entry)->key = key;
  vsnprintf((*entry)->value, sizeof(*entry)->value, format, values);
  va_end(values);
  (*entry)++;
}

void ocp_describe_device(const ocp_device_info *info, ocp_device_metadata entries[]) {
  ocp_device_metadata *entry = entries;
  /* Keys that begin with cuda_ have the names that ONNX Runtime's own CUDA plugin EP uses. */
  add(&entry, "cuda_device_id", "%d", info->ordinal);
  add(&entry, "name", "%s", info->name);
  add(&entry, "compute_capability", "%d.%d", info->cc_major, info->cc_minor);
  add(&entry, "cuda_compute_capability", "%d.%d", info->cc_major, info->cc_minor);
  add(&entry, "cuda_device_name", "%s", info->name);
  add(&entry, "memory_bytes", "%llu", (unsigned long long)info->memory_bytes);
  add(&entry, "driver_version", "%d.%d", info->driver_version / 1000, info->driver_version % 1000 / 10);
  add(&entry, "pci_bus_id", "%s", info->pci_bus_id);
  add(&entry, "emulated", "%d", info->emulated);
  add(&entry, "multiprocessors", "%d", info->multiprocessors);
  add(&entry, "max_shared_bytes", "%d", info->max_shared_bytes);
  /* For ONNX Runtime, "all" means that a compiled model may leave out any of the model's initializers. */
  add(&entry, "weightless_support", "all");
  add(&entry, "weightless_supported_modes", "all");
}
