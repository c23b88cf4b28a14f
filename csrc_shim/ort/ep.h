/* The OrtEp of a session. */
#ifndef OCP_ORT_EP_H
#define OCP_ORT_EP_H

#include "base/host.h"
#include "python/tables.h"

/* Creates an EP; NULL: out of memory. */
OrtEp *ocp_ep_create(const ocp_ep_config *config, ocp_identity identity);
/* Destroys the EP's CUDA graphs, and frees the memory of its captured and recorded Runs (data/capture.h,
 * data/recording.h). Called before Python releases the clusters. */
void ocp_ep_close(OrtEp *ep);
void ocp_ep_release(OrtEp *ep);

#endif
