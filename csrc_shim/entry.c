/* The two functions that the library exports. */
#include "core_table.h"

#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT OrtStatus *CreateEpFactories(const char *registered_name, const OrtApiBase *api_base, const OrtLogger *logger,
                                    OrtEpFactory **factories, size_t max_factories, size_t *num_factories);
EXPORT OrtStatus *ReleaseEpFactory(OrtEpFactory *factory);

OrtStatus *CreateEpFactories(const char *registered_name, const OrtApiBase *api_base, const OrtLogger *logger,
                             OrtEpFactory **factories, size_t max_factories, size_t *num_factories) {
  (void)logger;
  *num_factories = 0;
  if (!api_base && registered_name && strcmp(registered_name, OCP_CORE_REQUEST) == 0 && max_factories == 1) {
    *(const ocp_core **)(void *)factories = ocp_core_table();
    *num_factories = 1;
    return NULL;
  }
  return api_base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, "the factory is not built yet");
}

OrtStatus *ReleaseEpFactory(OrtEpFactory *factory) {
  (void)factory;
  return NULL;
}
