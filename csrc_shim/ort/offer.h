/* The devices that a factory offers to ORT. ORT asks for the devices while it holds its environment's lock. Threads
 * that hold Python's GIL may wait for that lock, so its holder must not wait for the GIL: C answers every call made
 * under the lock. */
#ifndef OCP_ORT_OFFER_H
#define OCP_ORT_OFFER_H

#include <stdatomic.h>

#include "base/host.h"
#include "device/device_list.h"
#include "ort/registration.h"

enum { OCP_MAX_OFFERED = 8 }; /* ORT's limit of OrtEpDevices for one library */

/* The devices that a factory has offered. The arrays are filled before num_devices is set; ocp_offer_withdraw sets the
 * elements of `hardware` and `owned` to NULL. */
typedef struct ocp_offer {
  _Atomic uint32_t num_devices;
  ocp_device_info devices[OCP_MAX_OFFERED];
  const OrtHardwareDevice *hardware[OCP_MAX_OFFERED];
  OrtHardwareDevice *owned[OCP_MAX_OFFERED]; /* made by the plugin for devices that ORT did not enumerate */
} ocp_offer;

/* Finds the devices, and makes OrtEpDevices for at most `room` of them. */
int ocp_offer_devices(ocp_offer *offer, const ocp_registration_request *request, OrtEpFactory *factory,
                      const OrtHardwareDevice *const *hardware, size_t num_hardware, OrtEpDevice **ep_devices,
                      size_t room, ocp_error *error);
/* Frees the offer, after ORT has released the OrtEpDevices. */
void ocp_offer_withdraw(ocp_offer *offer);
/* Returns the description of the plugin's device that is offered as this hardware; NULL: there is none. */
const ocp_device_info *ocp_offered_as(const ocp_offer *offer, const OrtHardwareDevice *hardware);
/* Returns the reason why the hardware is not offered, an OrtDeviceEpIncompatibilityReason, and a text; NONE if it is
 * offered, or if it is a GPU on which the plugin can run. */
uint32_t ocp_why_not_offered(const ocp_offer *offer, const OrtHardwareDevice *hardware, ocp_error *why);

/* Finds the PCI bus id of card<index> in a folder like /sys/class/drm; empty if unknown. For a GPU whose metadata in
 * ORT has a card index but no PCI bus id. */
void ocp_card_bus_id(const char *folder, const char *index, char bus_id[32]);

#endif
