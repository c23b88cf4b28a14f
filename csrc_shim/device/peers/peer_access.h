/* Peer access: copies between two devices without a staging buffer in host memory. */
#ifndef OCP_DEVICE_PEERS_PEER_ACCESS_H
#define OCP_DEVICE_PEERS_PEER_ACCESS_H

#include "base/error.h"
#include "device/device.h"

/* Lets the first device access the memory of the second one, so that copies between them need no staging buffer in host
 * memory. *is_direct: whether the hardware can do that; if not, the driver stages the copies. Safe to call again. */
int ocp_peer_connect(ocp_device *device, ocp_device *peer, bool *is_direct, ocp_error *error);

#endif
