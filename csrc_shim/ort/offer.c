#include "ort/offer.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "device/open/devices.h"
#include "ort/data/allocator.h"

/* ---- ORT's hardware devices ---- */

void ocp_card_bus_id(const char *folder, const char *index, char bus_id[32]) {
  char path[PATH_MAX], real[PATH_MAX];
  bus_id[0] = '\0';
  if (!*index || snprintf(path, sizeof path, "%s/card%s/device", folder, index) >= PATH_MAX || !realpath(path, real))
    return;
  const char *base = strrchr(real, '/');
  snprintf(bus_id, 32, "%.31s", base ? base + 1 : real);
}

static const char *entry(const OrtKeyValuePairs *pairs, const char *key) {
  const char *const *keys = NULL, *const *values = NULL;
  size_t count = 0;
  if (pairs)
    ocp_api->GetKeyValuePairs(pairs, &keys, &values, &count);
  for (size_t i = 0; i < count; i++)
    if (strcmp(keys[i], key) == 0)
      return values[i];
  return "";
}

static bool is_same(const ocp_device_info *info, const OrtHardwareDevice *hardware) {
  if (info->emulated || !info->pci_bus_id[0] || ocp_api->HardwareDevice_Type(hardware) != OrtHardwareDeviceType_GPU)
    return false;
  const OrtKeyValuePairs *metadata = ocp_api->HardwareDevice_Metadata(hardware);
  char of_card[32];
  const char *bus_id = entry(metadata, "pci_bus_id");
  if (!*bus_id) {
    ocp_card_bus_id("/sys/class/drm", entry(metadata, "card_idx"), of_card);
    bus_id = of_card;
  }
  return strcasecmp(bus_id, info->pci_bus_id) == 0;
}

static bool is_among(const ocp_device_info *infos, uint32_t count, const OrtHardwareDevice *hardware) {
  for (uint32_t i = 0; i < count; i++)
    if (is_same(&infos[i], hardware))
      return true;
  return false;
}

static int check(ocp_error *error, OrtStatus *status) { return status ? ocp_fail_status(error, status) : ORT_OK; }

static int make_hardware(const ocp_device_info *info, OrtHardwareDevice **out, ocp_error *error) {
  OrtKeyValuePairs *metadata = NULL;
  ocp_api->CreateKeyValuePairs(&metadata);
  ocp_api->AddKeyValuePair(metadata, "name", info->name);
  if (info->pci_bus_id[0])
    ocp_api->AddKeyValuePair(metadata, "pci_bus_id", info->pci_bus_id);
  if (info->emulated)
    ocp_api->AddKeyValuePair(metadata, "emulated", "1");
  check(error, ocp_ep_api->CreateHardwareDevice(OrtHardwareDeviceType_GPU, OCP_VENDOR_NVIDIA, (uint32_t)info->ordinal,
                                                "NVIDIA", metadata, out));
  ocp_api->ReleaseKeyValuePairs(metadata);
  return error->code;
}

/* ---- OrtEpDevice ---- */

static int add_memories(OrtEpDevice *ep_device, const ocp_device_info *info, ocp_error *error) {
  static const int kinds[] = {OCP_INFO_DEVICE, OCP_INFO_PINNED, OCP_INFO_READ_ONLY};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    const OrtMemoryInfo *memory = NULL;
    if (ocp_ort_memory_info(info->emulated != 0, info->ordinal, kinds[i], &memory, error) != ORT_OK ||
        check(error, ocp_ep_api->EpDevice_AddAllocatorInfo(ep_device, memory)) != ORT_OK)
      return error->code;
  }
  return ORT_OK;
}

static int make_ep_device(OrtEpFactory *factory, const ocp_device_info *info, const OrtHardwareDevice *hardware,
                          OrtEpDevice **out, ocp_error *error) {
  ocp_device_metadata entries[OCP_DEVICE_METADATA];
  OrtKeyValuePairs *metadata = NULL, *options = NULL;
  char ordinal[16];
  ocp_describe_device(info, entries);
  ocp_api->CreateKeyValuePairs(&metadata);
  ocp_api->CreateKeyValuePairs(&options);
  for (int i = 0; i < OCP_DEVICE_METADATA; i++)
    ocp_api->AddKeyValuePair(metadata, entries[i].key, entries[i].value);
  /* If the EP device had no device_id option, ORT would compare a session's device_id with the PCI device id of the
   * GPU. */
  snprintf(ordinal, sizeof ordinal, "%d", info->ordinal);
  ocp_api->AddKeyValuePair(options, "device_id", ordinal);
  check(error, ocp_ep_api->CreateEpDevice(factory, hardware, metadata, options, out));
  ocp_api->ReleaseKeyValuePairs(metadata);
  ocp_api->ReleaseKeyValuePairs(options);
  if (error->code == ORT_OK && add_memories(*out, info, error) != ORT_OK) {
    ocp_ep_api->ReleaseEpDevice(*out);
    *out = NULL;
  }
  return error->code;
}

/* ---- the offer ---- */

/* Finds the devices: GPUs first, then emulated devices. If there is no GPU, logs why. */
static int find(ocp_offer *offer, const ocp_registration_request *request, uint32_t room, uint32_t *found,
                ocp_error *error) {
  ocp_error why = {0};
  uint32_t gpus = 0, emulated = 0;
  if (request->cuda)
    ocp_list_devices(/*emulated=*/false, offer->devices, room, &gpus, &why);
  const uint32_t taken = gpus < room ? gpus : room;
  if (request->emulated &&
      ocp_list_devices(/*emulated=*/true, offer->devices + taken, room - taken, &emulated, error) != ORT_OK)
    return error->code;
  char line[sizeof why.text + 100];
  if (gpus > 0 && why.text[0]) {
    snprintf(line, sizeof line, "devices that the plugin does not offer: %s", why.text);
    ocp_log(ORT_LOGGING_LEVEL_WARNING, line, "GetSupportedDevices");
  }
  *found = gpus + emulated;
  if (*found > room) {
    snprintf(line, sizeof line,
             "found %u GPUs and %u emulated devices, but ONNX Runtime accepts %u devices: the plugin does not offer "
             "the last devices. Set CUDA_VISIBLE_DEVICES to choose GPUs",
             gpus, emulated, room);
    ocp_log(ORT_LOGGING_LEVEL_WARNING, line, "GetSupportedDevices");
    *found = room;
  } else if (*found == 0) {
    snprintf(line, sizeof line, "no CUDA device: %s. For the emulated device set ORT_CUDA_PLUGIN_EMULATE=1",
             why.text[0] ? why.text : "the CUDA driver reports no device");
    ocp_log(ORT_LOGGING_LEVEL_WARNING, line, "GetSupportedDevices");
  }
  return ORT_OK;
}

int ocp_offer_devices(ocp_offer *offer, const ocp_registration_request *request, OrtEpFactory *factory,
                      const OrtHardwareDevice *const *hardware, size_t num_hardware, OrtEpDevice **ep_devices,
                      size_t room, ocp_error *error) {
  uint32_t found = 0, made = 0;
  if (find(offer, request, room < OCP_MAX_OFFERED ? (uint32_t)room : OCP_MAX_OFFERED, &found, error) != ORT_OK)
    return error->code;
  for (; made < found; made++) {
    const ocp_device_info *info = &offer->devices[made];
    const OrtHardwareDevice *known = NULL;
    for (size_t i = 0; i < num_hardware; i++)
      if (is_same(info, hardware[i]))
        known = hardware[i];
    if (!known && make_hardware(info, &offer->owned[made], error) != ORT_OK)
      break;
    offer->hardware[made] = known ? known : offer->owned[made];
    if (make_ep_device(factory, info, offer->hardware[made], &ep_devices[made], error) != ORT_OK)
      break;
  }
  if (error->code != ORT_OK) { /* if a factory fails, ORT takes none of its devices */
    while (made > 0)
      ocp_ep_api->ReleaseEpDevice(ep_devices[--made]);
    ocp_offer_withdraw(offer);
    return error->code;
  }
  atomic_store(&offer->num_devices, found);
  return ORT_OK;
}

void ocp_offer_withdraw(ocp_offer *offer) {
  for (int i = 0; i < OCP_MAX_OFFERED; i++) {
    if (offer->owned[i])
      ocp_ep_api->ReleaseHardwareDevice(offer->owned[i]);
    offer->owned[i] = NULL;
    offer->hardware[i] = NULL;
  }
}

const ocp_device_info *ocp_offered_as(const ocp_offer *offer, const OrtHardwareDevice *hardware) {
  for (uint32_t i = 0; i < atomic_load(&offer->num_devices); i++)
    if (offer->hardware[i] == hardware)
      return &offer->devices[i];
  return NULL;
}

uint32_t ocp_why_not_offered(const ocp_offer *offer, const OrtHardwareDevice *hardware, ocp_error *why) {
  if (ocp_offered_as(offer, hardware) || is_among(offer->devices, atomic_load(&offer->num_devices), hardware))
    return OrtDeviceEpIncompatibility_NONE;
  const bool is_gpu = ocp_api->HardwareDevice_Type(hardware) == OrtHardwareDeviceType_GPU;
  if (!is_gpu || ocp_api->HardwareDevice_VendorId(hardware) != OCP_VENDOR_NVIDIA) {
    ocp_fail(why, ORT_FAIL, is_gpu ? "the device is not an NVIDIA GPU" : "the device is not a GPU");
    return OrtDeviceEpIncompatibility_DEVICE_INCOMPATIBLE;
  }
  ocp_device_info infos[OCP_MAX_DEVICES];
  uint32_t gpus = 0;
  ocp_list_devices(/*emulated=*/false, infos, OCP_MAX_DEVICES, &gpus, why);
  if (is_among(infos, gpus < OCP_MAX_DEVICES ? gpus : OCP_MAX_DEVICES, hardware))
    return OrtDeviceEpIncompatibility_NONE;
  if (!why->text[0])
    ocp_fail(why, ORT_FAIL,
             gpus > 0 ? "the CUDA driver does not show the device to this process (CUDA_VISIBLE_DEVICES)"
                      : "the CUDA driver reports no device");
  return OrtDeviceEpIncompatibility_DRIVER_INCOMPATIBLE;
}
