/* The functions that the library exports. They return a status even if Python cannot be loaded. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/host.h"
#include "base/process.h"
#include "ort/factory.h"
#include "ort/registration.h"
#include "ort/table.h"
#include "python/host.h"
#include "python/start.h"
#include "python/tables.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT OrtStatus *CreateEpFactories(const char *registered_name, const OrtApiBase *api_base, const OrtLogger *logger,
                                    OrtEpFactory **factories, size_t max_factories, size_t *num_factories);
EXPORT OrtStatus *ReleaseEpFactory(OrtEpFactory *factory);
EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *api_base);

static atomic_int live_factories;

/* Parses the N of the host's version 1.N.x, which is its API version; 0 if the text is malformed. Calling GetApi
 * instead would print to stderr for unsupported versions. */
static uint32_t host_version(const OrtApiBase *api_base) {
  const char *text = api_base->GetVersionString();
  return text && strncmp(text, "1.", 2) == 0 ? (uint32_t)strtoul(text + 2, NULL, 10) : 0;
}

static int use_host(const OrtApiBase *api_base, ocp_error *error) {
  uint32_t version = host_version(api_base);
  if (version < OCP_OLDEST_API)
    return ocp_fail(error, ORT_FAIL, "%s needs ONNX Runtime 1.%d or newer; this is %s", OCP_EP_NAME, OCP_OLDEST_API,
                    api_base->GetVersionString());
  const uint32_t host = version;
  if (version > OCP_NEWEST_API)
    version = OCP_NEWEST_API;
  const OrtApi *api = api_base->GetApi(version);
  if (!api)
    return ocp_fail(
        error, ORT_FAIL,
        "ONNX Runtime %s does not offer API version %u, which its version number includes. Install onnxruntime again",
        api_base->GetVersionString(), version);
  if (atomic_load(&live_factories) > 0 && api != ocp_api)
    return ocp_fail(error, ORT_FAIL,
                    "%s is already registered in another ONNX Runtime of this process. Create sessions with that "
                    "ONNX Runtime, or in another process",
                    OCP_EP_NAME);
  ocp_api = api;
  ocp_ep_api = api->GetEpApi();
  ocp_api_version = version;
  ocp_host_version = host;
  return ORT_OK;
}

/* Fails if this ONNX Runtime already has a provider of the requested name, because a session could not choose between
 * the two. */
static int refuse_to_replace(ocp_identity identity, ocp_error *error) {
  char **names = NULL;
  int count = 0;
  if (identity == OCP_IDENTITY_OWN)
    return ORT_OK;
  OrtStatus *status = ocp_api->GetAvailableProviders(&names, &count);
  if (status)
    return ocp_fail_status(error, status);
  for (int i = 0; i < count; i++)
    if (strcmp(names[i], ocp_ep_names[identity]) == 0)
      ocp_fail(error, ORT_INVALID_ARGUMENT,
               "this ONNX Runtime has a %s of its own. Replace the wheel onnxruntime-gpu by onnxruntime, or use the "
               "plugin under its own name, %s (without as_ and ORT_CUDA_PLUGIN_AS; ort-cuda-plugin with in place of "
               "exec)",
               names[i], OCP_EP_NAME);
  if ((status = ocp_api->ReleaseAvailableProviders(names, count)))
    ocp_api->ReleaseStatus(status);
  return error->code;
}

static OrtStatus *create_factory(const char *registered_name, OrtEpFactory **out) {
  ocp_error error = {0};
  ocp_registration_request request;
  if (atomic_load(&ocp_forked))
    return ocp_api->CreateStatus(ORT_FAIL, OCP_EP_NAME ": " OCP_FORKED_TEXT);
  ocp_watch_forks();
  if (ocp_python_prepare(ocp_core_table(), &error) != ORT_OK ||
      ocp_registration_requested(registered_name, &request, &error) != ORT_OK ||
      refuse_to_replace(request.identity, &error) != ORT_OK)
    return ocp_status(&error);
  *out = ocp_factory_create(registered_name, &request);
  return *out ? NULL : ocp_api->CreateStatus(ORT_FAIL, OCP_OUT_OF_HOST_MEMORY);
}

OrtStatus *CreateEpFactories(const char *registered_name, const OrtApiBase *api_base, const OrtLogger *logger,
                             OrtEpFactory **factories, size_t max_factories, size_t *num_factories) {
  if (num_factories)
    *num_factories = 0;
  if (factories && max_factories > 0)
    factories[0] = NULL;
  if (!api_base) { /* Python asks for ocp_core (python/tables.h). Without an OrtApiBase, no OrtStatus can be made. */
    if (registered_name && strcmp(registered_name, OCP_CORE_REQUEST) == 0 && factories && num_factories &&
        max_factories == 1) {
      *(const ocp_core **)(void *)factories = ocp_core_table();
      *num_factories = 1;
    }
    return NULL;
  }
  const OrtApi *oldest = api_base->GetApi(1);
  if (!factories || !num_factories || max_factories < 1)
    return oldest->CreateStatus(ORT_INVALID_ARGUMENT, "CreateEpFactories: got room for no factory, expected 1");
  ocp_error error = {0};
  if (use_host(api_base, &error) != ORT_OK)
    return oldest->CreateStatus((OrtErrorCode)error.code, error.text);
  OrtStatus *status = create_factory(registered_name ? registered_name : "", &factories[0]);
  if (status)
    return status;
  atomic_fetch_add(&live_factories, 1);
  *num_factories = 1;
  ocp_logger = logger;
  return NULL;
}

OrtStatus *ReleaseEpFactory(OrtEpFactory *factory) {
  if (!factory)
    return NULL;
  ocp_factory_close(factory);
  if (atomic_fetch_sub(&live_factories, 1) == 1)
    ocp_logger = NULL; /* the environment may be destroyed before the library is registered again */
  return NULL;
}

/* Adds the custom operators to session options. ORT itself asks the factory for custom operators only if the options
 * select one of its devices, not if they select the provider by name or not at all. The application calls this function
 * through SessionOptions.register_custom_ops_library or RegisterCustomOpsLibrary_V2. */
OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *api_base) {
  const OrtApi *oldest = api_base->GetApi(1);
  ocp_error error = {0};
  if (use_host(api_base, &error) != ORT_OK || ocp_python_prepare(ocp_core_table(), &error) != ORT_OK)
    return oldest->CreateStatus((OrtErrorCode)error.code, error.text);
  const ocp_python *python = ocp_python_call(&error);
  if (!python)
    return ocp_status(&error);
  OrtCustomOpDomain *const *domains = NULL;
  size_t count = 0;
  OrtStatus *status = ocp_python_status(python->custom_op_domains(&domains, &count));
  for (size_t i = 0; i < count && !status; i++)
    status = ocp_api->AddCustomOpDomain(options, domains[i]);
  return status;
}
