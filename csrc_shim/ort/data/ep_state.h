/* State of an OrtEp; private to this folder. Types only. */
#ifndef OCP_ORT_DATA_EP_STATE_H
#define OCP_ORT_DATA_EP_STATE_H

#include "base/host.h"
#include "ort/data/capture.h"
#include "python/tables.h"

typedef struct ocp_ep {
  OrtEp ort;            /* first member: ORT's view */
  void *newer_slots[4]; /* of OrtEp; NULL: what ORT does by default */
  ocp_ep_config config;
  ocp_identity identity; /* of the factory */
  ocp_capture *capture;  /* NULL: ORT captures nothing */
} ocp_ep;

static inline const ocp_ep_config *ocp_ep_config_of(const OrtEp *ep) { return &((const ocp_ep *)ep)->config; }

#endif
