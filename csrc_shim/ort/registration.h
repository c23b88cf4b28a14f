/* Which provider name and devices a registration of the library requests: from the registered name, environment
 * variables, or ort_cuda_plugin.register(). */
#ifndef OCP_ORT_REGISTRATION_H
#define OCP_ORT_REGISTRATION_H

#include "base/host.h"

typedef struct ocp_registration_request {
  ocp_identity identity;
  bool cuda, emulated; /* devices to offer */
} ocp_registration_request;

/* Sets the requests of the next registration on this thread, which override the environment: emulated devices or
 * not, and an ocp_identity; -1: the environment decides. */
void ocp_request_registration(int emulated, int identity);
/* Fails if a variable has an invalid value. */
int ocp_registration_requested(const char *registered_name, ocp_registration_request *request, ocp_error *error);

/* Reads the environment alone: 1 or 0 for ORT_CUDA_PLUGIN_EMULATE, an ocp_identity for ORT_CUDA_PLUGIN_AS; -1 with the
 * error. */
int ocp_emulation_requested(ocp_error *error);
int ocp_default_identity(ocp_error *error);

#endif
