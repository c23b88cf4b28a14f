#include "ort/table.h"

#include "base/counters.h"
#include "base/error.h"
#include "base/host.h"
#include "base/number.h"
#include "base/process.h"
#include "device/arena_options.h"
#include "device/device.h"
#include "device/device_list.h"
#include "device/memory/memory.h"
#include "device/memory/weights.h"
#include "device/open/arena_settings.h"
#include "device/open/devices.h"
#include "device/peers/peer_access.h"
#include "device/release.h"
#include "device/stream.h"
#include "device/wait.h"
#include "driver/cuda.h"
#include "driver/tracer.h"
#include "emulator/blocks/count.h"
#include "emulator/calls/emulator.h"
#include "emulator/calls/table.h"
#include "emulator/findings.h"
#include "ort/data/allocator.h"
#include "ort/external/ipc_memory.h"
#include "ort/factory.h"
#include "ort/kernels/compute.h"
#include "ort/kernels/custom_op.h"
#include "ort/kernels/kernels.h"
#include "ort/kernels/shape_kernel.h"
#include "ort/offer.h"
#include "ort/registration.h"
#include "plan/slab.h"
#include "python/host.h"
#include "run/cluster.h"
#include "run/executor.h"
#include "run/measure.h"
#include "run/plan_memory.h"
#include "run/precompute.h"
#include "vendor/problem.h"

static int64_t counter_get(uint32_t counter) {
  return counter < OCP_NUM_COUNTERS ? atomic_load_explicit(&ocp_counters[counter], memory_order_relaxed) : 0;
}

static void counter_add(uint32_t counter, int64_t by) {
  if (counter < OCP_NUM_COUNTERS)
    ocp_count((ocp_counter)counter, by);
}

static void counters_reset(void) {
  for (int i = 0; i < OCP_DEVICE_BYTES_IN_USE; i++)
    atomic_store_explicit(&ocp_counters[i], 0, memory_order_relaxed);
}

static const OrtApi *host_api(void) { return ocp_api; }
static const OrtEpApi *host_ep_api(void) { return ocp_ep_api; }
static uint32_t host_api_version(void) { return ocp_api_version; }
static uint32_t host_version(void) { return ocp_host_version; }
static const OrtLogger *host_logger(void) { return ocp_logger; }

static ocp_device *device_open(int emulated, int ordinal, ocp_error *error) {
  return ocp_device_open(emulated != 0, ordinal, error);
}

static int device_enter(ocp_device *device, ocp_stay *stay, ocp_error *error) {
  *stay = ocp_device_enter(device, error);
  return error->code;
}

static bool device_enter_to_release(const ocp_device *device, ocp_stay *stay) {
  *stay = ocp_device_enter_to_release(device);
  return stay->entered;
}

static ocp_cluster *cluster_create(ocp_device *device, const char *name, int64_t python_handle) {
  return ocp_cluster_create(device, name, ocp_python_build_variant, python_handle);
}

static int cluster_add_callback(ocp_cluster *cluster, uint32_t num_pointers, uint32_t num_numbers, ocp_error *error) {
  return ocp_cluster_add_callback(cluster, ocp_python_call_back, num_pointers, num_numbers, error);
}

static CUstream stream_handle(const ocp_stream *stream) { return stream->handle; }

static int memory_info(int emulated, int ordinal, int kind, const OrtMemoryInfo **out, ocp_error *error) {
  return ocp_ort_memory_info(emulated != 0, ordinal, kind, out, error);
}

static int memory_stats(int emulated, int ordinal, int memory, ocp_memory_stats *stats, ocp_error *error) {
  if (atomic_load(&ocp_forked)) /* locks that other threads held stay locked in a forked child */
    return ocp_fail(error, ORT_RUNTIME_EXCEPTION, "%s", OCP_FORKED_TEXT);
  ocp_device *device = ocp_device_open(emulated != 0, ordinal, error);
  if (device)
    ocp_pool_stats(device, memory == OCP_PINNED_MEMORY ? OCP_PINNED_MEMORY : OCP_DEVICE_MEMORY, stats);
  return error->code;
}

static const ocp_core core = {
    .abi = OCP_CORE_ABI,
    .num_counters = OCP_NUM_COUNTERS,
    .counter_names = ocp_counter_names,
    .counter_get = counter_get,
    .counter_add = counter_add,
    .counters_reset = counters_reset,
    .set_python = ocp_set_python,
    .shut_down = ocp_shut_down,
    .driver_cuda = ocp_driver_cuda,
    .driver_emulator = ocp_driver_emulator,
    .emu_configure = ocp_emu_configure,
    .emu_get_config = ocp_emu_get_config,
    .emu_num_findings = ocp_emu_num_findings,
    .emu_finding = ocp_emu_finding,
    .emu_clear_findings = ocp_emu_clear_findings,
    .emu_host_pointer = ocp_emu_host_pointer,
    .emu_count_launches = ocp_emu_count_launches,
    .emu_owns = ocp_emu_owns,
    .device_open = device_open,
    .device_enter = device_enter,
    .device_enter_to_release = device_enter_to_release,
    .device_leave = ocp_device_leave,
    .device_released = ocp_device_released,
    .device_synchronize = ocp_device_synchronize,
    .tracer_start = ocp_tracer_start,
    .tracer_stop = ocp_tracer_stop,
    .tracer_deliver = ocp_tracer_deliver,
    .device_alloc = ocp_device_alloc,
    .device_free = ocp_device_free,
    .stream_create = ocp_stream_create,
    .stream_adopt = ocp_stream_adopt,
    .stream_release = ocp_stream_release,
    .stream_synchronize = ocp_stream_synchronize,
    .cluster_create = cluster_create,
    .cluster_release = ocp_cluster_release,
    .cluster_add_kernels = ocp_cluster_add_kernels,
    .cluster_add_weights = ocp_cluster_add_weights,
    .cluster_set_host_inputs = ocp_cluster_set_host_inputs,
    .cluster_set_fed_inputs = ocp_cluster_set_fed_inputs,
    .cluster_add_plan = ocp_cluster_add_plan,
    .cluster_add_problem = ocp_cluster_add_problem,
    .cluster_add_callback = cluster_add_callback,
    .stream_handle = stream_handle,
    .cluster_set_graphs = ocp_cluster_set_graphs,
    .cluster_release_graphs = ocp_cluster_release_graphs,
    .library_load = ocp_library_load,
    .library_version = ocp_library_version,
    .problem_create = ocp_problem_create,
    .problem_release = ocp_problem_release,
    .weight_create_state = ocp_weight_create_state,
    .weight_memory_of = ocp_weight_memory_of,
    .weight_move_to_host = ocp_weight_move_to_host,
    .cluster_run = ocp_cluster_run,
    .weight_acquire = ocp_weight_acquire,
    .weight_release = ocp_weight_release,
    .weight_address = ocp_weight_address,
    .host_api = host_api,
    .host_ep_api = host_ep_api,
    .host_api_version = host_api_version,
    .host_version = host_version,
    .host_logger = host_logger,
    .memory_info = memory_info,
    .compute_info_create = ocp_compute_info_create,
    .node_kernel_create = ocp_node_kernel_create,
    .create_node_kernel = ocp_create_node_kernel,
    .create_shape_kernel = ocp_create_shape_kernel,
    .slab_pack = ocp_slab_pack,
    .cluster_precompute = ocp_cluster_precompute,
    .cluster_measure = ocp_cluster_measure,
    .cluster_memory = ocp_cluster_memory,
    .device_trim = ocp_device_trim,
    .device_fill_new_memory = ocp_device_fill_new_memory,
    .device_shrink = ocp_device_shrink,
    .memory_stats = memory_stats,
    .arena_check = ocp_arena_check,
    .parse_flag = ocp_parse_flag,
    .arena_read_limit = ocp_arena_read_limit,
    .arena_configure = ocp_arena_configure,
    .arena_set_limit = ocp_arena_set_limit,
    .device_available = ocp_device_available,
    .repeat_create = ocp_repeat_create,
    .repeat_release = ocp_repeat_release,
    .compute_info_of_repeat = ocp_compute_info_of_repeat,
    .peer_connect = ocp_peer_connect,
    .pipeline_create = ocp_pipeline_create,
    .pipeline_release = ocp_pipeline_release,
    .compute_info_of_pipeline = ocp_compute_info_of_pipeline,
    .custom_op_create = ocp_custom_op_create,
    .request_registration = ocp_request_registration,
    .emulation_requested = ocp_emulation_requested,
    .default_identity = ocp_default_identity,
    .registrations = ocp_registrations,
    .list_devices = ocp_list_devices,
    .describe_device = ocp_describe_device,
    .card_bus_id = ocp_card_bus_id,
    .ipc_memory_open = ocp_ipc_memory_open,
    .ipc_memory_tensor = ocp_ipc_memory_tensor,
    .ipc_tensor_delete = ocp_ipc_tensor_delete,
    .ipc_memory_close = ocp_ipc_memory_close,
    .ipc_memory_release = ocp_ipc_memory_release,
    .interrupt_after_call = ocp_interrupt_after_call,
};

const ocp_core *ocp_core_table(void) { return &core; }
