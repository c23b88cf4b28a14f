#include "base/host.h"

const char *const ocp_ep_names[OCP_NUM_IDENTITIES] = {OCP_EP_NAME, "CUDAExecutionProvider"};
const OrtApi *ocp_api;
const OrtEpApi *ocp_ep_api;
uint32_t ocp_api_version;
uint32_t ocp_host_version;
const OrtLogger *ocp_logger;

OrtStatus *ocp_status(const ocp_error *error) {
  return error->code == ORT_OK ? NULL : ocp_api->CreateStatus((OrtErrorCode)error->code, error->text);
}

int ocp_fail_status(ocp_error *error, OrtStatus *status) {
  ocp_fail(error, (int)ocp_api->GetErrorCode(status), "%s", ocp_api->GetErrorMessage(status));
  ocp_api->ReleaseStatus(status);
  return error->code;
}

void ocp_log(OrtLoggingLevel level, const char *text, const char *origin) {
  if (!ocp_logger)
    return;
  OrtStatus *status = ocp_api->Logger_LogMessage(ocp_logger, level, text, __FILE__, __LINE__, origin);
  if (status)
    ocp_api->ReleaseStatus(status);
}
