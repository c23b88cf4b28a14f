/* The host, ONNX Runtime: its API, OrtStatus and log. */
#ifndef OCP_BASE_HOST_H
#define OCP_BASE_HOST_H

#include "base/error.h"

#define OCP_EP_NAME "CudaPluginExecutionProvider"

/* The names under which ORT may know the provider: the plugin's own name, and the name of ORT's built-in CUDA EP, for
 * builds of ORT without that EP. An OrtEpFactory never changes its name; messages always say OCP_EP_NAME. */
typedef enum ocp_identity { OCP_IDENTITY_OWN, OCP_IDENTITY_CUDA, OCP_NUM_IDENTITIES } ocp_identity;
extern const char *const ocp_ep_names[OCP_NUM_IDENTITIES];

/* ORT's function tables. CreateEpFactories and RegisterCustomOps (ort/entry.c) set them and the two versions below,
 * before ORT calls any other function of the library. */
extern const OrtApi *ocp_api;
extern const OrtEpApi *ocp_ep_api;
/* The API version that the plugin uses, and writes into the member ort_version_supported of each struct that it gives
 * to ORT: the lower of OCP_NEWEST_API and ORT's own version. If a function pointer S of an API struct is newer than
 * OCP_OLDEST_API, it may be set or called only when ocp_api_version >= <Struct>_<S>_SINCE (ort_abi.h). */
extern uint32_t ocp_api_version;
/* ORT's own API version, not capped at OCP_NEWEST_API. The few function pointers that are newer than OCP_NEWEST_API may
 * be called only when ocp_host_version >= <Struct>_<S>_SINCE. */
extern uint32_t ocp_host_version;
/* The default logger of ORT's environment, for messages outside of a session; NULL while no factory is registered. */
extern const OrtLogger *ocp_logger;

OrtStatus *ocp_status(const ocp_error *error); /* NULL when error->code is 0 */
/* Copies the code and the message of ORT's status, which must not be NULL, into the error; releases the status and
 * returns the code. */
int ocp_fail_status(ocp_error *error, OrtStatus *status) __attribute__((cold));

/* Writes a line to the log of ORT's environment, if there is one; `origin` names the part of the library that logs. */
void ocp_log(OrtLoggingLevel level, const char *text, const char *origin);

#endif
