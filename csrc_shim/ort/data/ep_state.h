/* State of an OrtEp; private to csrc_shim/ort. Types only. */
#ifndef OCP_ORT_DATA_EP_STATE_H
#define OCP_ORT_DATA_EP_STATE_H

#include "base/host.h"
#include "ort/data/capture.h"
#include "ort/data/recording.h"
#include "python/tables.h"

typedef struct ocp_ep {
  OrtEp ort;            /* first member: ORT's view */
  void *newer_slots[4]; /* slots of OrtEp that are newer than this struct; NULL: ORT's default */
  ocp_ep_config config;
  ocp_identity identity;      /* the provider name under which the EP was registered */
  ocp_capture *capture;       /* NULL: captures are off */
  ocp_recordings *recordings; /* NULL: the application gave no stream, or ORT captures */
} ocp_ep;

static inline const ocp_ep_config *ocp_ep_config_of(const OrtEp *ep) { return &((const ocp_ep *)ep)->config; }

#endif
