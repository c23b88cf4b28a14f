/* Decodes an OrtMemoryDevice: host, pinned or device memory, and the device's index. */
#ifndef OCP_ORT_DATA_PLACE_H
#define OCP_ORT_DATA_PLACE_H

#include "base/ort_abi.h"

typedef enum ocp_place_kind { OCP_PLACE_HOST, OCP_PLACE_DEVICE, OCP_PLACE_PINNED, OCP_PLACE_FOREIGN } ocp_place_kind;
typedef struct ocp_place {
  ocp_place_kind kind;
  bool emulated;
  int ordinal;
} ocp_place;
ocp_place ocp_ort_place(const OrtMemoryDevice *memory_device);

#endif
