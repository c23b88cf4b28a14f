/* Determines which provider name and devices a registration of the library requests: from the registered name,
 * environment variables, or ort_cuda_plugin.register(). */
#ifndef OCP_ORT_REGISTRATION_H
#define OCP_ORT_REGISTRATION_H

#include "base/host.h"

typedef struct ocp_registration_request {
  ocp_identity identity;
  bool cuda, emulated; /* devices to offer */
} ocp_registration_request;

/* Sets the requests of the next registration on this thread, which override the environment: `emulated` (1: emulated
 * devices too, 0: none) and `identity` (an ocp_identity); -1: the environment decides. */
void ocp_request_registration(int emulated, int identity);
/* Determines the request of a registration under this name. Fails if an environment variable has an invalid value. */
int ocp_registration_requested(const char *registered_name, ocp_registration_request *request, ocp_error *error);

/* Return what the environment alone requests: ORT_CUDA_PLUGIN_EMULATE as 1 or 0; ORT_CUDA_PLUGIN_AS as an ocp_identity.
 * -1 with the error: the variable has an invalid value. */
int ocp_emulation_requested(ocp_error *error);
int ocp_default_identity(ocp_error *error);

#endif
