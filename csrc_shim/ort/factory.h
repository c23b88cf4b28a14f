/* OrtEpFactory. */
#ifndef OCP_ORT_FACTORY_H
#define OCP_ORT_FACTORY_H

#include "base/host.h"

/* NULL: out of memory. */
OrtEpFactory *ocp_factory_create(int64_t handle, ocp_identity identity);
/* The library was unregistered: returns the handle, and the factory forgets it. */
int64_t ocp_factory_close(OrtEpFactory *factory);
int64_t ocp_factory_handle(const OrtEpFactory *factory);

#endif
