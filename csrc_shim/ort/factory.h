/* The structs that ORT calls to create and to be an execution provider. */
#ifndef OCP_ORT_FACTORY_H
#define OCP_ORT_FACTORY_H

#include "python/tables.h"

/* NULL: out of memory. */
OrtEpFactory *ocp_factory_create(int64_t handle);
/* The library was unregistered: returns the handle, which the factory has no longer. */
int64_t ocp_factory_close(OrtEpFactory *factory);
int64_t ocp_factory_handle(const OrtEpFactory *factory);

OrtEp *ocp_ep_create(const ocp_ep_config *config);
/* Destroys what refers to clusters; before Python releases its side. */
void ocp_ep_close(OrtEp *ep);
void ocp_ep_release(OrtEp *ep);
int64_t ocp_ep_handle(const OrtEp *ep);

#endif
