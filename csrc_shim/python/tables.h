/* The two tables by which the library and Python call each other. cffi reads this file: build_plugin.py strips its
 * preprocessor lines and passes it to the bridge's cdef, after the headers whose types it uses.
 *
 * Python gets ocp_core from CreateEpFactories(OCP_CORE_REQUEST, NULL, NULL, (OrtEpFactory **)&core, 1, &n), which ORT
 * never calls without an API base. Python passes ocp_python to core->set_python. */
#ifndef OCP_PYTHON_TABLES_H
#define OCP_PYTHON_TABLES_H

#include "base/error.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/device_list.h"
#include "device/memory/weights.h"
#include "device/stream.h"
#include "driver/driver.h"
#include "driver/tracer.h"
#include "emulator/config.h"
#include "plan/slab.h"
#include "run/cluster.h"
#include "run/executor.h"
#include "run/instance/input.h"
#include "run/measure.h"
#include "run/pipeline.h"
#include "run/plan_memory.h"
#include "run/precompute.h"
#include "run/repeat.h"
#include "vendor/problem.h"

#ifndef OCP_CORE_ABI /* version of ocp_core and ocp_python; build_plugin.py defines it as a hash of the headers */
#define OCP_CORE_ABI 0u
#endif

#define OCP_CORE_REQUEST "ort_cuda_plugin.core"

/* ---- opaque for Python ---- */
typedef struct ocp_device ocp_device;
typedef struct ocp_stream ocp_stream;
typedef struct ocp_cluster ocp_cluster;
typedef struct ocp_weight ocp_weight;
typedef struct ocp_problem ocp_problem;
typedef struct ocp_ipc_memory ocp_ipc_memory;

/* The data that the C functions of an OrtEp need. */
typedef struct ocp_ep_config {
  int64_t handle; /* Python's handle of the EP */
  ocp_device *device;
  const OrtMemoryInfo *device_memory; /* owned by the factory */
  ocp_stream *stream;                 /* the stream of all Runs of the session; NULL: ORT makes one for each thread */
  uint32_t capture_warm_runs; /* number of warm (uncaptured) Runs before the captured Run; 0: captures are off */
  const char *const
      *channels_last; /* operators that ORT converts to NHWC, NULL-terminated; NULL: no operator. Python owns it */
  int64_t operators;  /* Python's handle of the set of custom operators that have kernels; 0: no set */
} ocp_ep_config;

/* The cluster that one node of ORT's graph calls, and the node's inputs and outputs. */
typedef struct ocp_node_kernel_spec {
  ocp_cluster *cluster;
  ocp_device *device;
  uint32_t num_inputs, num_outputs; /* numbers of the cluster's inputs and outputs */
  uint32_t num_constants;           /* inputs of the node whose contents the cluster holds */
  const uint32_t *positions;        /* indices at the node: of the inputs, of the outputs, then of the constants */
} ocp_node_kernel_spec;

/* An input or an output of an application's operator, as declared by an OrtCustomOp. */
typedef struct ocp_custom_port {
  uint32_t dtype;                   /* ONNXTensorElementDataType; undefined: any */
  uint32_t kind;                    /* OrtCustomOpInputOutputCharacteristic */
  uint32_t minimum, is_homogeneous; /* for a variadic port */
} ocp_custom_port;

typedef struct ocp_custom_op_spec {
  int64_t handle; /* Python's handle of the operator */
  const char *name;
  uint32_t since; /* the first version of the domain that has the operator */
  uint32_t num_inputs, num_outputs;
  const ocp_custom_port *ports; /* inputs, then outputs */
} ocp_custom_op_spec;

/* A tensor in memory of another process, by the numbers of DLPack. */
typedef struct ocp_dlpack_spec {
  uint64_t address;
  uint8_t code, bits; /* of the element type */
  int32_t rank;
  const int64_t *shape;
} ocp_dlpack_spec;

/* A cluster that does the work of a refused library call with kernels of the plugin. Its inputs are the call's tensors,
 * including the one that the call writes. Input i is a vector of elements[i] elements. */
enum { OCP_MAX_SUBSTITUTE_INPUTS = 5 };
typedef struct ocp_substitute {
  ocp_cluster *cluster;
  uint32_t dtype, num_inputs;
  int64_t elements[OCP_MAX_SUBSTITUTE_INPUTS];
} ocp_substitute;

/* An active registration of the library. Its pointers stay valid until the process ends. */
typedef struct ocp_registration {
  const char *name;
  uint32_t identity; /* ocp_identity of base/host.h */
  uint32_t num_devices;
  const ocp_device_info *devices;
} ocp_registration;

/* The functions that Python offers to the library. Every member is called through ocp_python_call (host.h), which
 * counts the calls. Each is an `extern "Python"` of the bridge that catches every exception, and reports it through the
 * error or the status if the member has one.
 *
 * A member waits for the GIL. A thread that holds the GIL may wait for ORT's environment lock, for example in ORT's
 * Python functions. So no member is called while ORT holds that lock: CreateEpFactories, ReleaseEpFactory,
 * GetSupportedDevices, allocators and data transfers call no member. */
enum { OCP_PYTHON_BROKE = 1 }; /* returned instead of a status: Python failed to create one */
typedef struct ocp_python {
  uint32_t abi;
  OrtStatus *(*validate_compatibility)(const ocp_device_info *const *devices, size_t num_devices, const char *info,
                                       OrtCompiledModelCompatibility *out);
  /* Returns the domains of the operators that applications have registered; they live as long as the process. */
  OrtStatus *(*custom_op_domains)(OrtCustomOpDomain *const **domains, size_t *count);
  /* infer_custom_op tells ORT the types and shapes of a node's outputs, as far as they are known. explain_custom_op
   * returns an error that says why no provider runs a node. */
  void (*infer_custom_op)(int64_t op, const OrtShapeInferContext *context);
  OrtStatus *(*explain_custom_op)(int64_t op, const OrtKernelInfo *info);
  OrtStatus *(*create_ep)(uint32_t identity, const OrtKeyValuePairs *const *metadata, size_t num_devices,
                          const OrtSessionOptions *options, const OrtLogger *logger, ocp_ep_config *config);
  void (*release_ep)(int64_t ep);
  OrtStatus *(*get_capability)(int64_t ep, const OrtGraph *graph, OrtEpGraphSupportInfo *info);
  OrtStatus *(*compile)(int64_t ep, const OrtGraph **graphs, const OrtNode **fused_nodes, size_t count,
                        OrtNodeComputeInfo **infos, OrtNode **ep_context_nodes);
  /* Returns the compatibility string of a model that the session compiled; the text lives as long as the EP. */
  OrtStatus *(*compatibility_info)(int64_t ep, const char **info);
  /* Adds the kernels of the operator table, and of the custom operators `operators`, to a registry of the EP `ep_name`.
   */
  OrtStatus *(*add_kernels)(OrtKernelRegistry *registry, const char *ep_name, int64_t operators);
  OrtStatus *(*create_kernel)(int64_t ep, const OrtKernelInfo *info, OrtKernelImpl **out);
  OrtStatus *(*set_dynamic_options)(int64_t ep, const char *const *keys, const char *const *values, size_t count);
  /* Finds or makes the cluster that permutes the axes of a tensor; it lives as long as the EP. */
  int (*transposition)(int64_t ep, const uint32_t *permutation, uint32_t rank, uint32_t dtype, ocp_cluster **cluster,
                       ocp_error *error);
  /* Builds and adds the plan that these inputs need. host_values: the elements of all host inputs as int64, one input
   * after the other. */
  int (*build_variant)(int64_t cluster, const ocp_input *inputs, uint32_t num_inputs, const int64_t *host_values,
                       const uint32_t *host_counts, uint32_t num_host_inputs, ocp_error *error);
  /* Runs a callback of a plan: ocp_call_fn. */
  int (*call_back)(int64_t cluster, uint32_t callback, const uint64_t *pointers, uint32_t num_pointers,
                   const int64_t *numbers, uint32_t num_numbers, ocp_stream *stream, ocp_error *error);
  /* Read and write execution plans of vendor libraries in the persistent store: ocp_plan_store. *bytes is 0 if the
   * store has no plan for the key. */
  int (*load_plan)(const char *key, char *data, uint64_t capacity, uint64_t *bytes, ocp_error *error);
  int (*keep_plan)(const char *key, const char *data, uint64_t bytes, ocp_error *error);
  /* Makes or finds the substitute of a call that a library refuses: ocp_substitutes. `lasts`: whether to remember the
   * refusal for later processes. *substitute is valid until the device's last cluster with library problems ends. */
  int (*make_substitute)(ocp_device *device, const char *library, const ocp_problem_spec *spec, const int64_t *values,
                         uint32_t num_values, const char *why, int lasts, const ocp_substitute **substitute,
                         ocp_error *error);
  /* Compiles PTX or a fatbin for the emulated device, and passes the object to `deliver`. */
  int (*translate_image)(const void *image, uint64_t bytes, void (*deliver)(void *context, const void *, uint64_t),
                         void *context, ocp_error *error);
  /* Control CUPTI for profiles of GPUs: begin, pass the recorded activities to tracer_deliver, end. Each trace_begin
   * that succeeds is followed by a trace_end. */
  int (*trace_begin)(ocp_error *error);
  int (*trace_collect)(ocp_error *error);
  void (*trace_end)(void);
} ocp_python;

/* The functions that the library offers to Python. Members raise no exception. cffi releases the GIL around each call,
 * so other threads run while a member blocks, and a member may call Python. */
typedef struct ocp_core {
  uint32_t abi;
  /* ---- counters ---- */
  uint32_t num_counters;
  const char *const *counter_names;
  int64_t (*counter_get)(uint32_t counter);
  void (*counter_add)(uint32_t counter, int64_t by);
  void (*counters_reset)(void); /* resets all counters except bytes in use and numbers of live objects */
  /* ---- connection with Python ---- */
  int (*set_python)(const ocp_python *python, ocp_error *error);
  void (*shut_down)(void); /* the interpreter is about to exit: no more calls into Python */
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
  int (*device_enter)(ocp_device *device, ocp_stay *stay, ocp_error *error); /* device_leave ends the stay */
  void (*device_released)(ocp_device *device, CUresult result, const char *call);
  int (*device_synchronize)(ocp_device *device, ocp_error *error);
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
  int (*cluster_set_fed_inputs)(ocp_cluster *cluster, const uint32_t *inputs, uint32_t count, ocp_error *error);
  int (*cluster_add_plan)(ocp_cluster *cluster, const void *blob, size_t bytes, ocp_error *error);
  int (*cluster_run)(ocp_cluster *cluster, ocp_stream *stream, const ocp_input *inputs, uint32_t num_inputs,
                     ocp_output_fn output, void *output_context, ocp_error *error);
  int (*weight_acquire)(ocp_device *device, ocp_weight_memory memory, const void *data, size_t bytes, ocp_weight **out,
                        ocp_error *error);
  void (*weight_release)(ocp_weight *weight);
  CUdeviceptr (*weight_address)(const ocp_weight *weight);
  /* ---- the host ---- */
  const OrtApi *(*host_api)(void);
  const OrtEpApi *(*host_ep_api)(void);
  uint32_t (*host_api_version)(void);
  uint32_t (*host_version)(void);
  const OrtLogger *(*host_logger)(void);
  /* kind: OCP_INFO_... of ort/data/allocator.h */
  int (*memory_info)(int emulated, int ordinal, int kind, const OrtMemoryInfo **out, ocp_error *error);
  /* See ort/kernels/compute.h. */
  OrtNodeComputeInfo *(*compute_info_create)(ocp_cluster *cluster, ocp_device *device, const char *const *names,
                                             const uint32_t *positions, uint32_t num_inputs, uint32_t num_outputs,
                                             ocp_error *error);
  OrtKernelImpl *(*node_kernel_create)(const ocp_node_kernel_spec *spec, ocp_error *error);
  /* For KernelRegistry_AddKernel: functions that create kernels of nodes, and kernels of Shape and Size, whose outputs
   * are in host memory. */
  OrtKernelCreateFunc create_node_kernel, create_shape_kernel;
  /* ---- further members, in any order: bridge and library are built together ---- */
  int (*cluster_add_problem)(ocp_cluster *cluster, ocp_problem *problem, ocp_error *error);
  uint64_t (*slab_pack)(ocp_slab_item *items, uint32_t count);
  int (*library_load)(uint32_t library, const char *path, ocp_error *error);
  uint64_t (*library_version)(uint32_t library);
  ocp_problem *(*problem_create)(const ocp_problem_spec *spec, ocp_error *error);
  void (*problem_release)(ocp_problem *problem);
  int (*weight_create_state)(ocp_device *device, const void *data, size_t bytes, ocp_weight **out, ocp_error *error);
  ocp_weight_memory (*weight_memory_of)(const ocp_weight *weight);
  int (*weight_move_to_host)(ocp_weight *weight, ocp_error *error);
  int (*cluster_precompute)(ocp_cluster *cluster, ocp_weight *const *results, uint32_t count, ocp_error *error);
  int (*cluster_measure)(ocp_cluster *cluster, double *seconds, ocp_error *error);
  bool (*cluster_memory)(ocp_cluster *cluster, ocp_plan_memory *memory);
  int64_t (*device_trim)(ocp_device *device);
  int64_t (*device_shrink)(ocp_device *device);
  void (*device_fill_new_memory)(ocp_device *device, int byte);
  int (*memory_stats)(int emulated, int ordinal, int memory, ocp_memory_stats *stats, ocp_error *error);
  int (*arena_check)(const char *const *keys, const char *const *values, size_t count, ocp_error *error);
  int (*parse_flag)(const char *text); /* base/number.h */
  int (*arena_read_limit)(const char *text, int64_t *bytes, ocp_error *error);
  int (*arena_configure)(int emulated, int ordinal, int memory, const char *const *keys, const char *const *values,
                         size_t count, char *warning, ocp_error *error);
  int (*arena_set_limit)(int emulated, int ordinal, int memory, int64_t bytes, ocp_error *error);
  void (*cluster_set_graphs)(ocp_cluster *cluster, uint32_t warm_runs, uint32_t max_graphs);
  void (*cluster_release_graphs)(ocp_cluster *cluster);
  int (*device_available)(ocp_device *device, uint64_t *bytes, ocp_error *error);
  bool (*device_enter_to_release)(const ocp_device *device,
                                  ocp_stay *stay); /* works on a lost device; not after a fork */
  void (*device_leave)(ocp_stay *stay);
  void (*emu_count_launches)(ocp_emu_count *count);
  void (*tracer_start)(const ocp_tracer_functions *functions);
  void (*tracer_stop)(void);
  void (*tracer_deliver)(const ocp_trace_record *record);
  ocp_repeat *(*repeat_create)(ocp_device *device, const ocp_repeat_spec *spec, ocp_error *error);
  void (*repeat_release)(ocp_repeat *repeat);
  OrtNodeComputeInfo *(*compute_info_of_repeat)(const ocp_repeat *repeat, ocp_device *device, const char *const *names,
                                                ocp_error *error);
  int (*peer_connect)(ocp_device *device, ocp_device *peer, bool *is_direct, ocp_error *error);
  ocp_pipeline *(*pipeline_create)(const ocp_pipeline_spec *spec, ocp_error *error);
  void (*pipeline_release)(ocp_pipeline *pipeline);
  OrtNodeComputeInfo *(*compute_info_of_pipeline)(const ocp_pipeline *pipeline, ocp_device *device,
                                                  const char *const *names, ocp_error *error);
  /* Adds a callback to the cluster, which calls call_back. Returns its index, or -1 with the error. */
  int (*cluster_add_callback)(ocp_cluster *cluster, uint32_t num_pointers, uint32_t num_numbers, ocp_error *error);
  CUstream (*stream_handle)(const ocp_stream *stream);
  const OrtCustomOp *(*custom_op_create)(const ocp_custom_op_spec *spec,
                                         ocp_error *error); /* ort/kernels/custom_op.h */
  /* ---- registrations and devices: ort/registration.h, ort/factory.h, ort/offer.h, device/device_list.h ---- */
  void (*request_registration)(int emulated, int identity);
  int (*emulation_requested)(ocp_error *error);
  int (*default_identity)(ocp_error *error);
  uint32_t (*registrations)(ocp_registration *out, uint32_t room); /* returns the number of registrations */
  int (*list_devices)(int emulated, ocp_device_info *infos, uint32_t room, uint32_t *count, ocp_error *error);
  void (*describe_device)(const ocp_device_info *info, ocp_device_metadata *entries);
  void (*card_bus_id)(const char *folder, const char *index, char *bus_id);
  /* ---- memory of other processes: ort/external/ipc_memory.h ---- */
  int (*ipc_memory_open)(ocp_device *device, const char *handle, uint64_t offset, uint64_t bytes, uint64_t *address,
                         ocp_ipc_memory **out, ocp_error *error);
  void *(*ipc_memory_tensor)(ocp_ipc_memory *memory, const ocp_dlpack_spec *spec, ocp_error *error);
  void (*ipc_tensor_delete)(void *tensor);
  int (*ipc_memory_close)(ocp_ipc_memory *memory, ocp_error *error);
  void (*ipc_memory_release)(ocp_ipc_memory *memory);
  void (*interrupt_after_call)(void); /* sends SIGINT to this thread after its call into Python has returned */
} ocp_core;

#endif
