/* The OrtEpFactory of a registration of the library. */
#ifndef OCP_ORT_FACTORY_H
#define OCP_ORT_FACTORY_H

#include "base/host.h"
#include "ort/registration.h"
#include "python/tables.h"

/* Creates a factory; NULL: out of memory. */
OrtEpFactory *ocp_factory_create(const char *registered_name, const ocp_registration_request *request);
void ocp_factory_close(OrtEpFactory *factory); /* called when ORT unregisters the library */
/* Writes up to `room` active registrations to `out`; returns the number of all active registrations. */
uint32_t ocp_registrations(ocp_registration *out, uint32_t room);

#endif
