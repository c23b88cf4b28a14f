/* The two tables through which the library and Python know each other. Written so that cffi can read it:
 * build_plugin.py strips preprocessor lines and gives this file, after driver.h, emu.h and executor.h, to the bridge's
 * cdef.
 *
 * Python gets ocp_core from CreateEpFactories(OCP_CORE_REQUEST, NULL, NULL, (OrtEpFactory **)&core, 1, &n): a call
 * without an API base is no ORT call. It gives ocp_python back through core->set_python. */
#ifndef OCP_CORE_TABLE_H
#define OCP_CORE_TABLE_H

#include "emu.h"
#include "executor.h"

#define OCP_CORE_REQUEST "ort_cuda_plugin.core"

/* Python's side. Every member is called through ocp_python_call (python_host.c), the one place that counts calls into
 * Python; each is an `extern "Python"` of the bridge that catches every exception and reports it through the error or
 * the status. */
typedef struct ocp_python {
  uint32_t abi;
  OrtStatus *(*create_factories)(const char *registered_name, const OrtApiBase *api_base, const OrtLogger *logger,
                                 OrtEpFactory **factories, size_t max_factories, size_t *num_factories);
  OrtStatus *(*release_factory)(OrtEpFactory *factory);
  OrtStatus *(*get_supported_devices)(int64_t factory, const OrtHardwareDevice *const *devices, size_t num_devices,
                                      OrtEpDevice **ep_devices, size_t max_ep_devices, size_t *num_ep_devices);
  OrtStatus *(*create_ep)(int64_t factory, const OrtHardwareDevice *const *devices,
                          const OrtKeyValuePairs *const *metadata, size_t num_devices, const OrtSessionOptions *options,
                          const OrtLogger *logger, OrtEp **ep);
  void (*release_ep)(int64_t ep);
  OrtStatus *(*get_capability)(int64_t ep, const OrtGraph *graph, OrtEpGraphSupportInfo *info);
  OrtStatus *(*compile)(int64_t ep, const OrtGraph **graphs, const OrtNode **fused_nodes, size_t count,
                        OrtNodeComputeInfo **infos, OrtNode **ep_context_nodes);
  void (*release_compute_infos)(int64_t ep, OrtNodeComputeInfo **infos, size_t count);
  /* Builds and adds the plan that these inputs need. host_values: for each host input in turn its elements as int64. */
  int (*build_variant)(int64_t cluster, const ocp_input *inputs, uint32_t num_inputs, const int64_t *host_values,
                       const uint32_t *host_counts, uint32_t num_host_inputs, ocp_error *error);
} ocp_python;

#endif
