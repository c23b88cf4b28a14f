/* The two tables through which the library and Python know each other. Written so that cffi can read it:
 * build_plugin.py strips preprocessor lines and gives this file, after driver/driver.h, emulator/emulator.h and
 * run/executor.h, to the bridge's cdef.
 *
 * Python gets ocp_core from CreateEpFactories(OCP_CORE_REQUEST, NULL, NULL, (OrtEpFactory **)&core, 1, &n): a call
 * without an API base is no ORT call. It gives ocp_python back through core->set_python. */
#ifndef OCP_PYTHON_TABLES_H
#define OCP_PYTHON_TABLES_H

#include "device/arena_config.h"
#include "emulator/emulator.h"
#include "plan/slab.h"
#include "run/executor.h"
#include "vendor/problem.h"

#define OCP_CORE_REQUEST "ort_cuda_plugin.core"

/* Python's side. Every member is called through ocp_python_call (host.c), the one place that counts calls into
 * Python; each is an `extern "Python"` of the bridge that catches every exception and reports it through the error or
 * the status. */
/* What an OrtEp's C callbacks need to know. */
typedef struct ocp_ep_config {
  int64_t handle; /* Python's */
  ocp_device *device;
  const OrtMemoryInfo *device_memory; /* owned by the factory */
  ocp_stream *stream;                 /* of all Runs of the session; NULL: ORT makes one for each thread */
  uint32_t capture_warm_runs;         /* ORT captures Runs after so many; 0: it does not */
} ocp_ep_config;

typedef struct ocp_python {
  uint32_t abi;
  OrtStatus *(*create_factory)(const char *registered_name, const OrtLogger *logger, int64_t *factory);
  void (*release_factory)(int64_t factory);
  OrtStatus *(*get_supported_devices)(int64_t factory, OrtEpFactory *ort_factory,
                                      const OrtHardwareDevice *const *devices, size_t num_devices,
                                      OrtEpDevice **ep_devices, size_t max_ep_devices, size_t *num_ep_devices);
  OrtStatus *(*create_ep)(int64_t factory, const OrtHardwareDevice *const *devices,
                          const OrtKeyValuePairs *const *metadata, size_t num_devices, const OrtSessionOptions *options,
                          const OrtLogger *logger, ocp_ep_config *config);
  void (*release_ep)(int64_t ep);
  OrtStatus *(*get_capability)(int64_t ep, const OrtGraph *graph, OrtEpGraphSupportInfo *info);
  OrtStatus *(*compile)(int64_t ep, const OrtGraph **graphs, const OrtNode **fused_nodes, size_t count,
                        OrtNodeComputeInfo **infos, OrtNode **ep_context_nodes);
  /* Builds and adds the plan that these inputs need. host_values: for each host input in turn its elements as int64. */
  int (*build_variant)(int64_t cluster, const ocp_input *inputs, uint32_t num_inputs, const int64_t *host_values,
                       const uint32_t *host_counts, uint32_t num_host_inputs, ocp_error *error);
} ocp_python;

/* The table to make one call into Python through, counted in OCP_PYTHON_CALLS; NULL with the error when Python must not
 * be called: it was never started, is shutting down, or this process is a forked child. */
const ocp_python *ocp_python_call(ocp_error *error);
/* To be called after each: sends the interrupt on that Python has turned into an error. */
void ocp_python_returned(void);
/* The same, and what ORT gets for the status that Python returned. */
OrtStatus *ocp_python_status(OrtStatus *status);
enum { OCP_PYTHON_BROKE = 1 }; /* in place of a status: Python failed, and failed again when it made the status */
/* Makes ocp_python_call work: uses the Python of this process, or starts the one of the environment that the library is
 * installed in. Idempotent, thread safe. */
int ocp_python_start(ocp_error *error);
bool ocp_python_is_ready(void);
int ocp_set_python(const ocp_python *python, ocp_error *error);
void ocp_shut_down(void);
void ocp_interrupt_after_call(void);

/* What Python gets from the library. Members never raise and take no GIL; those that can block release nothing, so
 * cffi's release of the GIL around each call is what lets other threads go on. */
typedef struct ocp_core {
  uint32_t abi;
  /* ---- counters ---- */
  uint32_t num_counters;
  const char *const *counter_names;
  int64_t (*counter_get)(uint32_t counter);
  void (*counter_add)(uint32_t counter, int64_t by);
  void (*counters_reset)(void); /* what is in use or alive keeps its value */
  /* ---- the two ways in ---- */
  int (*set_python)(const ocp_python *python, ocp_error *error);
  void (*shut_down)(void); /* the interpreter is about to go: no more calls into Python */
  /* ---- devices ---- */
  const ocp_driver *(*driver_cuda)(const char **why);
  const ocp_driver *(*driver_emulator)(void);
  int (*emu_configure)(const ocp_emu_config *config, char *text, size_t text_bytes);
  void (*emu_get_config)(ocp_emu_config *config);
  int (*emu_num_findings)(void);
  int (*emu_finding)(int index, char *text, size_t text_bytes);
  void (*emu_clear_findings)(void);
  void *(*emu_host_pointer)(uint64_t address, size_t bytes);
  int (*emu_owns)(uint64_t address);
  ocp_device *(*device_open)(int emulated, int ordinal, ocp_error *error);
  int (*device_enter)(ocp_device *device, ocp_error *error);
  int (*device_alloc)(ocp_device *device, size_t bytes, ocp_stream *stream, CUdeviceptr *address, ocp_error *error);
  void (*device_free)(ocp_device *device, CUdeviceptr address, ocp_stream *stream);
  int (*stream_create)(ocp_device *device, ocp_stream **out, ocp_error *error);
  int (*stream_adopt)(ocp_device *device, CUstream handle, ocp_stream **out, ocp_error *error);
  void (*stream_release)(ocp_stream *stream);
  int (*stream_synchronize)(ocp_stream *stream, ocp_error *error);
  /* ---- clusters ---- */
  ocp_cluster *(*cluster_create)(ocp_device *device, const char *name, int64_t python_handle);
  void (*cluster_release)(ocp_cluster *cluster);
  int (*cluster_add_kernels)(ocp_cluster *cluster, const ocp_kernel_ref *kernels, uint32_t count, ocp_error *error);
  int (*cluster_add_weights)(ocp_cluster *cluster, ocp_weight *const *weights, uint32_t count, ocp_error *error);
  int (*cluster_set_host_inputs)(ocp_cluster *cluster, const uint32_t *inputs, uint32_t count, ocp_error *error);
  int (*cluster_add_plan)(ocp_cluster *cluster, const void *blob, size_t bytes, ocp_error *error);
  int (*cluster_run)(ocp_cluster *cluster, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                     ocp_output_fn output, void *output_context, ocp_error *error);
  int (*weight_acquire)(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
  void (*weight_release)(ocp_weight *weight);
  CUdeviceptr (*weight_address)(const ocp_weight *weight);
  /* ---- the host ---- */
  const OrtApi *(*host_api)(void);
  const OrtEpApi *(*host_ep_api)(void);
  uint32_t (*host_api_version)(void);
  const OrtLogger *(*host_logger)(void);
  /* kind: OCP_INFO_... of ort/memory.h */
  int (*memory_info)(int emulated, int ordinal, int kind, const OrtMemoryInfo **out, ocp_error *error);
  OrtNodeComputeInfo *(*compute_info_create)(ocp_cluster *cluster, ocp_device *device, uint32_t num_inputs,
                                             uint32_t num_outputs, ocp_error *error);
  const char *(*emu_last_error)(void);
  /* ---- appended by the owners of other parts, in any order: bridge and library are built together ---- */
  int (*cluster_add_problem)(ocp_cluster *cluster, ocp_problem *problem, ocp_error *error);
  uint64_t (*slab_pack)(ocp_slab_item *items, uint32_t count);
  int (*library_load)(uint32_t library, const char *path, ocp_error *error);
  ocp_problem *(*problem_create)(const ocp_problem_spec *spec, ocp_error *error);
  void (*problem_release)(ocp_problem *problem);
  int (*weight_create_state)(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
  bool (*cluster_memory)(ocp_cluster *cluster, ocp_plan_memory *memory);
  int64_t (*device_trim)(ocp_device *device);
  int (*memory_stats)(int emulated, int ordinal, int memory, ocp_memory_stats *stats, ocp_error *error);
  int (*arena_check)(const char *const *keys, const char *const *values, size_t count, ocp_error *error);
  int (*arena_configure)(int emulated, int ordinal, int memory, const char *const *keys, const char *const *values,
                         size_t count, char *warning, ocp_error *error);
  int (*arena_set_limit)(int emulated, int ordinal, int memory, int64_t bytes, ocp_error *error);
  void (*cluster_set_graphs)(ocp_cluster *cluster, uint32_t warm_runs, uint32_t max_graphs);
  void (*cluster_release_graphs)(ocp_cluster *cluster);
  bool (*device_enter_to_release)(const ocp_device *device); /* also a lost one; false in a forked child */
  void (*interrupt_after_call)(void); /* SIGINT for this thread when its call into Python has returned */
} ocp_core;

const ocp_core *ocp_core_table(void);

#endif
