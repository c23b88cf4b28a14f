/* The OrtEpFactory. Python answers the calls that ORT makes for sessions; C answers those during registration of the
 * library (offer.h). */
#include "ort/factory.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/host.h"
#include "device/open/devices.h"
#include "ort/callers.h"
#include "ort/data/allocator.h"
#include "ort/data/ep_state.h"
#include "ort/data/memory.h"
#include "ort/data/stream.h"
#include "ort/ep.h"
#include "ort/external/importer.h"
#include "ort/offer.h"
#include "python/host.h"
#include "python/tables.h"

#ifndef OCP_VERSION /* build_plugin.py defines it from the package's version */
#define OCP_VERSION "0.0.0"
#endif

/* A factory lives as long as the process. Even after the library was unregistered, ORT calls it to release the
 * allocators of living values and the EPs of living sessions, and to create EPs for session options that name its
 * devices. */
typedef struct ocp_factory {
  OrtEpFactory ort; /* first member: ORT's view */
  char *registered_name;
  ocp_registration_request request;
  ocp_offer offer;
  atomic_bool unregistered;
  struct ocp_factory *earlier; /* next older entry of `factories` */
} ocp_factory;

static _Atomic(ocp_factory *) factories;

static const char *get_name(const OrtEpFactory *factory) {
  return ocp_ep_names[((const ocp_factory *)factory)->request.identity];
}

static const char *get_vendor(const OrtEpFactory *factory) {
  (void)factory;
  return "NVIDIA"; /* like the vendor id below, because ORT prefers the provider of the device's vendor */
}

static uint32_t get_vendor_id(const OrtEpFactory *factory) {
  (void)factory;
  return OCP_VENDOR_NVIDIA;
}

static const char *get_version(const OrtEpFactory *factory) {
  (void)factory;
  return OCP_VERSION;
}

/* Returns whether the library is still registered; false with the error. ORT frees its OrtHardwareDevices at
 * unregistration, so they must not be used afterwards. */
static bool is_registered(const OrtEpFactory *factory, ocp_error *error) {
  const bool registered = !atomic_load(&((const ocp_factory *)factory)->unregistered);
  if (!registered)
    ocp_fail(error, ORT_FAIL, "%s: the library was unregistered; register it again and get its devices again",
             OCP_EP_NAME);
  return registered;
}

static OrtStatus *get_supported_devices(OrtEpFactory *factory, const OrtHardwareDevice *const *devices,
                                        size_t num_devices, OrtEpDevice **ep_devices, size_t max_ep_devices,
                                        size_t *num_ep_devices) {
  *num_ep_devices = 0;
  ocp_error error = {0};
  ocp_factory *this_factory = (ocp_factory *)(void *)factory;
  if (!is_registered(factory, &error) ||
      ocp_offer_devices(&this_factory->offer, &this_factory->request, factory, devices, num_devices, ep_devices,
                        max_ep_devices, &error) != ORT_OK)
    return ocp_status(&error);
  *num_ep_devices = atomic_load(&this_factory->offer.num_devices);
  return NULL;
}

static OrtStatus *create_ep(OrtEpFactory *factory, const OrtHardwareDevice *const *devices,
                            const OrtKeyValuePairs *const *metadata, size_t num_devices,
                            const OrtSessionOptions *options, const OrtLogger *logger, OrtEp **ep) {
  (void)devices;
  *ep = NULL;
  ocp_error error = {0};
  const ocp_identity identity = ((const ocp_factory *)(void *)factory)->request.identity;
  const ocp_python *python = is_registered(factory, &error) ? ocp_python_call(&error) : NULL;
  if (!python)
    return ocp_status(&error);
  ocp_ep_config config = {0};
  OrtStatus *status = ocp_python_status(python->create_ep(identity, metadata, num_devices, options, logger, &config));
  if (status)
    return status;
  *ep = ocp_ep_create(&config, identity);
  if (*ep)
    return NULL;
  python->release_ep(config.handle);
  ocp_python_returned();
  return ocp_api->CreateStatus(ORT_FAIL, OCP_OUT_OF_HOST_MEMORY);
}

static void release_ep(OrtEpFactory *factory, OrtEp *ep) {
  (void)factory;
  if (!ep)
    return;
  ocp_ep_close(ep);
  ocp_error error = {0};
  const ocp_python *python = ocp_python_call(&error);
  if (python) { /* Python may be gone at the end of the process */
    python->release_ep(ocp_ep_config_of(ep)->handle);
    ocp_python_returned();
  }
  ocp_ep_release(ep);
}

static OrtStatus *validate_compatibility(OrtEpFactory *factory, const OrtHardwareDevice *const *devices,
                                         size_t num_devices, const char *info, OrtCompiledModelCompatibility *out) {
  *out = OrtCompiledModelCompatibility_EP_NOT_APPLICABLE;
  ocp_error error = {0};
  const ocp_device_info *offered[OCP_MAX_OFFERED];
  size_t count = 0;
  if (!is_registered(factory, &error) || !info)
    return ocp_status(&error);
  for (size_t i = 0; i < num_devices && count < OCP_MAX_OFFERED; i++)
    if ((offered[count] = ocp_offered_as(&((const ocp_factory *)(void *)factory)->offer, devices[i])))
      count++;
  const ocp_python *python = ocp_python_call(&error);
  return python ? ocp_python_status(python->validate_compatibility(offered, count, info, out)) : ocp_status(&error);
}

static OrtStatus *get_incompatibility(OrtEpFactory *factory, const OrtHardwareDevice *device,
                                      OrtDeviceEpIncompatibilityDetails *details) {
  ocp_error error = {0};
  if (!is_registered(factory, &error) || !device || !details)
    return ocp_status(&error);
  const uint32_t reason = ocp_why_not_offered(&((const ocp_factory *)(void *)factory)->offer, device, &error);
  return reason == OrtDeviceEpIncompatibility_NONE
             ? NULL
             : ocp_ep_api->DeviceEpIncompatibilityDetails_SetDetails(details, reason, /*error_code=*/0, error.text);
}

static OrtStatus *create_importer(OrtEpFactory *factory, const OrtEpDevice *ep_device,
                                  OrtExternalResourceImporterImpl **importer) {
  *importer = NULL;
  ocp_error error = {0};
  if (!is_registered(factory, &error))
    return ocp_status(&error);
  const ocp_device_info *info =
      ep_device ? ocp_offered_as(&((const ocp_factory *)(void *)factory)->offer, ocp_api->EpDevice_Device(ep_device))
                : NULL;
  if (!info)
    return ocp_api->CreateStatus(ORT_INVALID_ARGUMENT,
                                 "external resources: the device is not one that " OCP_EP_NAME " offers");
  ocp_device *device = ocp_device_open(info->emulated, info->ordinal, &error);
  if (device)
    ocp_ort_create_importer(device, ep_device, importer, &error);
  return ocp_status(&error);
}

/* Returns the domains of custom operators; none after the library was unregistered, since no session can be created on
 * its devices then. */
static OrtStatus *custom_op_domains(OrtEpFactory *factory, OrtCustomOpDomain *const **domains, size_t *count) {
  *count = 0;
  ocp_error error = {0};
  if (atomic_load(&((const ocp_factory *)(void *)factory)->unregistered))
    return NULL;
  const ocp_python *python = ocp_python_call(&error);
  return python ? ocp_python_status(python->custom_op_domains(domains, count)) : ocp_status(&error);
}

/* Returns whether ORT has already asked for the domains of custom operators while creating this session. For a session
 * that selects its devices, ORT asks once for each device of each factory. Before 1.31, ORT fails if two answers
 * contain a domain of the same name, and the call does not name the device. So only the first call of a session gets
 * the domains. ORT makes the same number of calls for each session, all on one thread. ORT also asks when devices are
 * added to session options; the answer to this call replaces the domains of earlier answers. */
static bool is_another_question_of_a_session(void) {
  size_t num_devices = 0;
  for (const ocp_factory *factory = atomic_load(&factories); factory; factory = factory->earlier)
    num_devices += atomic_load(&factory->unregistered) ? 0 : atomic_load(&factory->offer.num_devices);
  if (num_devices < 2 || ocp_host_version >= 31)
    return false;
  const OrtCompileApi *compile = ocp_api->GetCompileApi(); /* NULL in minimal builds */
  void *const makers[] = {
      (void *)ocp_api->CreateSession,
      (void *)ocp_api->CreateSessionFromArray,
      (void *)ocp_api->CreateSessionWithPrepackedWeightsContainer,
      (void *)ocp_api->CreateSessionFromArrayWithPrepackedWeightsContainer,
      compile ? (void *)compile->CompileModel : NULL,
  };
  if (!ocp_called_from(makers, sizeof makers / sizeof *makers))
    return false;
  static _Thread_local uint32_t questions;
  return questions++ % num_devices != 0;
}

static OrtStatus *get_num_custom_op_domains(OrtEpFactory *factory, size_t *num_domains) {
  *num_domains = 0;
  if (is_another_question_of_a_session())
    return NULL;
  OrtCustomOpDomain *const *domains = NULL;
  return custom_op_domains(factory, &domains, num_domains);
}

/* Fills `domains`, with NULL where there are fewer than num_domains: another thread may have changed the operators
 * since ORT asked for their number. */
static OrtStatus *get_custom_op_domains(OrtEpFactory *factory, OrtCustomOpDomain **domains, size_t num_domains) {
  OrtCustomOpDomain *const *found = NULL;
  size_t count = 0;
  OrtStatus *status = custom_op_domains(factory, &found, &count);
  for (size_t i = 0; i < num_domains; i++)
    domains[i] = i < count ? found[i] : NULL;
  return status;
}

/* ORT asks the EP to make a CUDA context that shares a queue of the graphics API. The plugin uses the primary context
 * of the device, as other CUDA libraries do, and CUDA cannot attach such a queue to a primary context. */
static OrtStatus *init_graphics(OrtEpFactory *factory, const OrtEpDevice *device,
                                const OrtGraphicsInteropConfig *config) {
  (void)factory, (void)device, (void)config;
  return ocp_api->CreateStatus(
      ORT_NOT_IMPLEMENTED, "graphics interop: " OCP_EP_NAME
                           " uses the primary CUDA context, which cannot share a queue of a graphics API. Importing "
                           "memory and semaphores needs no such context: leave this call out");
}

static OrtStatus *deinit_graphics(OrtEpFactory *factory, const OrtEpDevice *device) {
  (void)factory, (void)device;
  return NULL; /* init_graphics never succeeds, so there is nothing to undo */
}

static OrtStatus *select_model_candidate(OrtEpFactory *factory, const OrtHardwareDevice *device,
                                         const OrtKeyValuePairs *const *candidates, size_t num_candidates,
                                         const OrtSessionOptions *options, size_t *selected_index) {
  (void)factory, (void)device, (void)candidates, (void)options;
  *selected_index = 0;
  return num_candidates > 0
             ? NULL
             : ocp_api->CreateStatus(ORT_INVALID_ARGUMENT, "expected at least one compiled model, got none");
}

/* Every slot up to the negotiated version gets a function, because ORT calls some slots without checking for NULL. */
OrtEpFactory *ocp_factory_create(const char *registered_name, const ocp_registration_request *request) {
  ocp_factory *factory = calloc(1, sizeof *factory);
  if (factory)
    factory->registered_name = strdup(registered_name);
  if (!factory || !factory->registered_name) {
    free(factory);
    return NULL;
  }
  factory->request = *request;
  factory->ort = (OrtEpFactory){
      .ort_version_supported = ocp_api_version,
      .GetName = get_name,
      .GetVendor = get_vendor,
      .GetSupportedDevices = get_supported_devices,
      .CreateEp = create_ep,
      .ReleaseEp = release_ep,
      .GetVendorId = get_vendor_id,
      .GetVersion = get_version,
      .ValidateCompiledModelCompatibilityInfo = validate_compatibility,
      .CreateAllocator = ocp_ort_create_allocator,
      .ReleaseAllocator = ocp_ort_release_allocator,
      .CreateDataTransfer = ocp_ort_create_data_transfer,
      .IsStreamAware = ocp_ort_is_stream_aware,
      .CreateSyncStreamForDevice = ocp_ort_create_sync_stream,
      .GetHardwareDeviceIncompatibilityDetails = get_incompatibility,
      .CreateExternalResourceImporterForDevice = create_importer,
      .GetNumCustomOpDomains = get_num_custom_op_domains,
      .GetCustomOpDomains = get_custom_op_domains,
      .InitGraphicsInterop = init_graphics,
      .DeinitGraphicsInterop = deinit_graphics,
  };
  if (ocp_api_version >= OrtEpFactory_SelectBestModelCandidate_SINCE)
    factory->ort.SelectBestModelCandidate = select_model_candidate;
  factory->earlier = atomic_load(&factories);
  while (!atomic_compare_exchange_weak(&factories, &factory->earlier, factory))
    ;
  return &factory->ort;
}

void ocp_factory_close(OrtEpFactory *released) {
  ocp_factory *factory = (ocp_factory *)(void *)released;
  if (!atomic_exchange(&factory->unregistered, true))
    ocp_offer_withdraw(&factory->offer);
}

uint32_t ocp_registrations(ocp_registration *out, uint32_t room) {
  uint32_t count = 0;
  for (const ocp_factory *factory = atomic_load(&factories); factory; factory = factory->earlier) {
    if (atomic_load(&factory->unregistered))
      continue;
    if (count < room)
      out[count] = (ocp_registration){
          .name = factory->registered_name,
          .identity = factory->request.identity,
          .num_devices = atomic_load(&factory->offer.num_devices),
          .devices = factory->offer.devices,
      };
    count++;
  }
  return count;
}
