/* Tests of the C library without ONNX Runtime and without Python: calls every slot with hostile arguments, then runs
 * sessions on several threads. Built with sanitizers over the whole library.
 *
 * mock_host KERNELS.o [inline|adversarial] [seed] */
#include <string.h>

#include "base/counters.h"
#include "base/error.h"
#include "base/host.h"
#include "check.h"
#include "device/device.h"
#include "device/memory/mempool.h"
#include "device/open/devices.h"
#include "device/order.h"
#include "device/pool.h"
#include "device/stream.h"
#include "emulator/calls/emulator.h"
#include "emulator/calls/table.h"
#include "mock_host.h"
#include "ort/data/allocator.h"
#include "ort/data/stream.h"
#include "ort/ep.h"
#include "ort/factory.h"
#include "ort/kernels/kernels.h"
#include "python/host.h"
#include "python/start.h"
#include "python/tables.h"

OrtEpFactory *factory;
OrtMemoryDevice device_memory, pinned_memory, other_device_memory;
OrtAllocator *device_allocator, *pinned_allocator;
OrtDataTransferImpl *transfer;
ocp_device *device;
CUcontext host_context;

static _Thread_local bool is_elsewhere;
static _Thread_local CUcontext elsewhere;

void be_elsewhere(CUcontext context) {
  CHECK(ocp_driver_emulator()->CtxSetCurrent(context) == CUDA_SUCCESS);
  elsewhere = context;
  is_elsewhere = true;
}

void check_elsewhere(void) {
  CUcontext current = NULL;
  CHECK(ocp_driver_emulator()->CtxGetCurrent(&current) == CUDA_SUCCESS);
  CHECK(!is_elsewhere || current == elsewhere);
}

void check_fails(OrtStatus *status, const char *with) {
  check_elsewhere();
  CHECK(status);
  if (!strstr(status->text, with)) {
    fprintf(stderr, "expected «%s» in «%s»\n", with, status->text);
    abort();
  }
  ocp_api->ReleaseStatus(status);
}

void check_ok(OrtStatus *status) {
  check_elsewhere();
  if (status)
    fprintf(stderr, "%s\n", status->text);
  CHECK(!status);
}

static OrtAllocator *make_allocator_with(OrtMemoryDevice memory, const OrtKeyValuePairs *options) {
  OrtMemoryInfo info = {.device = memory};
  OrtAllocator *allocator = NULL;
  check_ok(factory->CreateAllocator(factory, &info, options, &allocator));
  return allocator;
}

static OrtAllocator *make_allocator(OrtMemoryDevice memory) { return make_allocator_with(memory, NULL); }

OrtSyncStream make_stream(void) {
  OrtSyncStream stream = {0};
  check_ok(factory->CreateSyncStreamForDevice(factory, &device_memory, NULL, &stream.impl));
  return stream;
}

void finish_run(OrtSyncStream *stream) {
  check_ok(stream->impl->OnSessionRunEnd(stream->impl));
  check_ok(stream->impl->Flush(stream->impl));
}

void copy(const OrtValue *src, OrtValue *dst, OrtSyncStream *stream) {
  check_ok(transfer->CopyTensors(transfer, &src, &dst, stream ? &stream : NULL, 1));
}

/* ---- slots with hostile arguments ---- */

static void test_slots_that_need_python_say_that_it_is_missing(void) {
  OrtEp *ep = (OrtEp *)(uintptr_t)1;
  check_fails(factory->CreateEp(factory, NULL, NULL, 0, NULL, NULL, &ep), "Python");
  CHECK(ep == NULL);
  factory->ReleaseEp(factory, NULL);
  ocp_ep_config config = {.device = device};
  ep = ocp_ep_create(&config, OCP_IDENTITY_OWN);
  CHECK(ep);
  OrtNodeComputeInfo *infos[2] = {(OrtNodeComputeInfo *)(uintptr_t)1, (OrtNodeComputeInfo *)(uintptr_t)1};
  OrtNode *nodes[2] = {(OrtNode *)(uintptr_t)1, (OrtNode *)(uintptr_t)1};
  check_fails(ep->Compile(ep, NULL, NULL, 2, infos, nodes), "Python");
  CHECK(!infos[0] && !infos[1] && !nodes[0] && !nodes[1]);
  ep->ReleaseNodeComputeInfos(ep, infos, 2);
  check_fails(ep->GetCapability(ep, NULL, NULL), "Python");
  check_ok(ep->OnRunStart(ep, NULL));
  check_ok(ep->Sync(ep));
  ocp_ep_release(ep);
}

static void test_memory_that_is_not_ours_is_refused(void) {
  const OrtMemoryDevice foreign[] = {
      mock_cpu,
      {OrtMemoryInfoDeviceType_NPU, OCP_VENDOR_NVIDIA, 0, OrtDeviceMemoryType_DEFAULT},
      {OrtMemoryInfoDeviceType_GPU, 0x1002, 0, OrtDeviceMemoryType_DEFAULT},
      {OrtMemoryInfoDeviceType_GPU, OCP_VENDOR_EMULATED, 0, (OrtDeviceMemoryType)3},
  };
  for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
    OrtMemoryInfo info = {.device = foreign[i]};
    OrtAllocator *allocator = (OrtAllocator *)(uintptr_t)1;
    check_fails(factory->CreateAllocator(factory, &info, NULL, &allocator), "no allocator");
    CHECK(!allocator);
    OrtSyncStreamImpl *stream = (OrtSyncStreamImpl *)(uintptr_t)1;
    check_fails(factory->CreateSyncStreamForDevice(factory, &foreign[i], NULL, &stream),
                "cannot create a stream for this memory");
    CHECK(!stream);
    if (i > 0)
      CHECK(!transfer->CanCopy(transfer, &foreign[i], &device_memory) &&
            !transfer->CanCopy(transfer, &device_memory, &foreign[i]));
  }
  OrtMemoryDevice missing = mock_device(ocp_vendor_id(true), 63, OrtDeviceMemoryType_DEFAULT);
  OrtSyncStreamImpl *stream = NULL;
  check_fails(factory->CreateSyncStreamForDevice(factory, &missing, NULL, &stream), "no emulated CUDA device 63");
  missing.id = UINT32_MAX;
  check_fails(factory->CreateSyncStreamForDevice(factory, &missing, NULL, &stream),
              "CUDA device -1: expected a number from 0 to 63");
  missing.id = 63;
  OrtAllocator *allocator = make_allocator(missing);
  int messages = atomic_load(&mock_log_messages);
  CHECK(allocator->Alloc(allocator, 16) == NULL && atomic_load(&mock_log_messages) == messages + 1);
  factory->ReleaseAllocator(factory, allocator);
  factory->ReleaseAllocator(factory, NULL);
}

static void test_a_data_transfer_claims_only_memory_of_one_kind_of_device(void) {
  OrtMemoryDevice real = mock_device(OCP_VENDOR_NVIDIA, 0, OrtDeviceMemoryType_DEFAULT);
  CHECK(transfer->CanCopy(transfer, &mock_cpu, &device_memory));
  CHECK(transfer->CanCopy(transfer, &device_memory, &mock_cpu));
  CHECK(transfer->CanCopy(transfer, &device_memory, &device_memory));
  CHECK(transfer->CanCopy(transfer, &pinned_memory, &device_memory));
  CHECK(transfer->CanCopy(transfer, &device_memory, &other_device_memory));
  CHECK(transfer->CanCopy(transfer, &mock_cpu, &real));
  /* Without a GPU, the emulated device has NVIDIA's vendor id, and takes the place of a real one. */
  bool in_its_place = ocp_vendor_id(/*emulated=*/true) == OCP_VENDOR_NVIDIA;
  CHECK(transfer->CanCopy(transfer, &real, &device_memory) == in_its_place);
  CHECK(transfer->CanCopy(transfer, &device_memory, &real) == in_its_place);
  CHECK(!transfer->CanCopy(transfer, &mock_cpu, &mock_cpu));
}

static void test_copies_that_cannot_be_say_why(void) {
  const int64_t eight = 8, nine = 9;
  float host[9] = {0};
  OrtValue small = mock_tensor(device_allocator, device_memory, FLOAT, 1, &eight);
  OrtValue large = mock_wrap(host, mock_cpu, FLOAT, 1, &nine);
  OrtValue text = mock_wrap(host, mock_cpu, ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING, 1, &eight);
  OrtValue here = mock_wrap(host, mock_cpu, FLOAT, 1, &eight);
  const OrtValue *src = &large;
  OrtValue *dst = &small;
  check_fails(transfer->CopyTensors(transfer, &src, &dst, NULL, 1), "36 bytes into one of 32");
  src = &text;
  check_fails(transfer->CopyTensors(transfer, &src, &dst, NULL, 1), "strings");
  src = &here;
  dst = &here;
  check_fails(transfer->CopyTensors(transfer, &src, &dst, NULL, 1), "cannot copy");
  OrtValue nowhere = small;
  nowhere.device.id = 63;
  dst = &nowhere;
  check_fails(transfer->CopyTensors(transfer, &src, &dst, NULL, 1), "no emulated CUDA device 63");
  check_ok(transfer->CopyTensors(transfer, NULL, NULL, NULL, 0));
  mock_free(&small);
}

static void test_free_takes_any_address(void) {
  int messages = atomic_load(&mock_log_messages);
  int local = 0;
  device_allocator->Free(device_allocator, NULL);
  CHECK(atomic_load(&mock_log_messages) == messages);
  device_allocator->Free(device_allocator, &local);
  void *address = device_allocator->Alloc(device_allocator, 1000),
       *pinned = pinned_allocator->Alloc(pinned_allocator, 1);
  device_allocator->Free(device_allocator, (char *)address + 256);
  device_allocator->Free(device_allocator, pinned);
  pinned_allocator->Free(pinned_allocator, address);
  device_allocator->Free(device_allocator, address);
  device_allocator->Free(device_allocator, address);
  pinned_allocator->Free(pinned_allocator, pinned);
  CHECK(atomic_load(&mock_log_messages) == messages + 5);
}

static int64_t stat_of(OrtAllocator *allocator, const char *name) {
  OrtKeyValuePairs *stats = NULL;
  int64_t value = -1;
  check_ok(allocator->GetStats(allocator, &stats));
  for (size_t i = 0; i < stats->count; i++)
    if (strcmp(stats->keys[i], name) == 0)
      value = atoll(stats->values[i]);
  ocp_api->ReleaseKeyValuePairs(stats);
  return value;
}

static void test_allocators_tell_their_statistics(void) {
  void *address = device_allocator->Reserve(device_allocator, 5000);
  CHECK(stat_of(device_allocator, "InUse") >= 5000);
  device_allocator->Free(device_allocator, address);
  CHECK(device_allocator->Info(device_allocator)->device.vendor == ocp_vendor_id(/*emulated=*/true));
  CHECK(device_allocator->Shrink && !device_allocator->AllocOnStream && !pinned_allocator->AllocOnStream);
}

static void test_an_allocator_for_initializers_bypasses_the_arena(void) {
  OrtMemoryInfo info = {.device = device_memory, .type = OrtReadOnlyAllocator};
  OrtAllocator *allocator = NULL;
  check_ok(factory->CreateAllocator(factory, &info, NULL, &allocator));
  CHECK(!allocator->AllocOnStream && !allocator->Shrink && allocator->Info(allocator)->type == OrtReadOnlyAllocator);
  const int64_t reserves = stat_of(allocator, "NumReserves"), extensions = stat_of(allocator, "NumArenaExtensions");
  const int64_t in_use = stat_of(allocator, "InUse");
  void *address = allocator->Alloc(allocator, 3 << 20);
  CHECK(address && stat_of(allocator, "NumReserves") == reserves + 1);
  CHECK(stat_of(allocator, "NumArenaExtensions") == extensions && stat_of(allocator, "InUse") == in_use + (3 << 20));
  allocator->Free(allocator, address);
  CHECK(stat_of(allocator, "InUse") == in_use);
  factory->ReleaseAllocator(factory, allocator);
}

static void test_memory_that_is_too_large_is_refused_and_logged(void) {
  static const size_t sizes[] = {(size_t)1 << 47, (size_t)1 << 50, (size_t)1 << 63, SIZE_MAX - 255, SIZE_MAX};
  int messages = atomic_load(&mock_log_messages);
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    CHECK(!device_allocator->Alloc(device_allocator, sizes[i]) &&
          !device_allocator->Reserve(device_allocator, sizes[i]));
    CHECK(!pinned_allocator->Alloc(pinned_allocator, sizes[i]) &&
          !pinned_allocator->Reserve(pinned_allocator, sizes[i]));
    messages += 4;
    CHECK(atomic_load(&mock_log_messages) == messages);
  }
}

static void test_memory_for_streams_that_do_not_fit(void) {
  OrtSyncStream other = {0};
  check_ok(factory->CreateSyncStreamForDevice(factory, &other_device_memory, NULL, &other.impl));
  ocp_ort_allocating_on(ocp_ort_stream(&other));
  void *all[] = {device_allocator->Alloc(device_allocator, 0), device_allocator->Alloc(device_allocator, 100),
                 device_allocator->Reserve(device_allocator, 100), device_allocator->Reserve(device_allocator, 0)};
  ocp_ort_allocating_on(NULL);
  other.impl->Release(other.impl);
  for (size_t i = 0; i < 4; i++) {
    CHECK(all[i]);
    for (size_t k = 0; k < i; k++)
      CHECK(all[i] != all[k]);
  }
  for (size_t i = 0; i < 4; i++)
    device_allocator->Free(device_allocator, all[i]);
}

/* With a CUDA memory pool, an allocation is work of its stream: other streams must wait before they use the memory. */
static void test_an_allocation_of_a_pool_is_work_of_its_stream(void) {
  OrtSyncStream stream = make_stream();
  ocp_stream *own = ocp_ort_stream(&stream);
  ocp_ort_allocating_on(own);
  void *address = device_allocator->Alloc(device_allocator, 12345);
  ocp_ort_allocating_on(NULL);
  CHECK(ocp_stream_is_idle(own) == !ocp_mempool_is_wanted(device->pool->mempool));
  device_allocator->Free(device_allocator, address);
  stream.impl->Release(stream.impl);
}

/* ---- copies, notifications, Memcpy kernels ---- */

static void test_tensors_survive_a_way_through_all_memories(void) {
  const int64_t dims[] = {3, 5, 7};
  float there[105], back[105] = {0};
  for (int i = 0; i < 105; i++)
    there[i] = (float)i;
  OrtSyncStream stream = make_stream();
  for (int with_stream = 0; with_stream < 2; with_stream++) {
    OrtSyncStream *used = with_stream ? &stream : NULL;
    OrtValue a = mock_wrap(there, mock_cpu, FLOAT, 3, dims), z = mock_wrap(back, mock_cpu, FLOAT, 3, dims);
    OrtValue pinned = mock_tensor(pinned_allocator, pinned_memory, FLOAT, 3, dims);
    OrtValue first = mock_tensor(device_allocator, device_memory, FLOAT, 3, dims);
    OrtValue second = mock_tensor(device_allocator, device_memory, FLOAT, 3, dims);
    memset(back, 0, sizeof back);
    copy(&a, &pinned, used);
    copy(&pinned, &first, used);
    copy(&first, &second, used);
    copy(&second, &z, used);
    if (used)
      finish_run(used);
    CHECK(memcmp(there, back, sizeof back) == 0);
    mock_free(&pinned);
    mock_free(&first);
    mock_free(&second);
  }
  stream.impl->Release(stream.impl);
}

static void test_tensors_go_from_device_to_device(void) {
  const int64_t dims[] = {1000};
  float there[1000], back[1000] = {0};
  for (int i = 0; i < 1000; i++)
    there[i] = (float)i;
  OrtAllocator *other_allocator = make_allocator(other_device_memory);
  OrtSyncStream streams[2] = {make_stream(), {0}};
  check_ok(factory->CreateSyncStreamForDevice(factory, &other_device_memory, NULL, &streams[1].impl));
  for (int use = 0; use < 3; use++) {
    OrtSyncStream *used = use == 2 ? NULL : &streams[use]; /* of the first device, of the other one, or no stream */
    OrtValue a = mock_wrap(there, mock_cpu, FLOAT, 1, dims), z = mock_wrap(back, mock_cpu, FLOAT, 1, dims);
    OrtValue first = mock_tensor(device_allocator, device_memory, FLOAT, 1, dims);
    OrtValue second = mock_tensor(other_allocator, other_device_memory, FLOAT, 1, dims);
    OrtValue pinned = mock_tensor(pinned_allocator, pinned_memory, FLOAT, 1, dims);
    memset(back, 0, sizeof back);
    copy(&a, &first, used);
    copy(&first, &second, used);
    copy(&second, &pinned, used); /* pinned memory belongs to the first device */
    copy(&pinned, &z, used);
    CHECK(memcmp(there, back, sizeof back) == 0);
    if (used)
      finish_run(used);
    mock_free(&first);
    mock_free(&second);
    mock_free(&pinned);
  }
  for (int i = 0; i < 2; i++)
    streams[i].impl->Release(streams[i].impl);
  factory->ReleaseAllocator(factory, other_allocator);
}

static void *handle_of_nobody(OrtSyncStreamImpl *this_ptr) { return this_ptr; }

/* Streams of ORT are identified by their handles alone. */
static void test_streams_are_known_by_their_handles(void) {
  OrtSyncStreamImpl impl = {.GetHandle = handle_of_nobody};
  OrtSyncStream stream = make_stream(), other = {0}, foreign = {&impl}, without_handle = {NULL};
  ocp_error error;
  CHECK(ocp_ort_stream_view(ocp_ort_stream(&stream), &error) == stream.impl);
  CHECK(!ocp_ort_stream(&foreign) && !ocp_ort_stream(&without_handle) && !ocp_ort_stream(NULL));
  stream.impl->Release(stream.impl);
  ocp_stream *defaults[2];
  CHECK_OK(ocp_stream_adopt(device, NULL, &defaults[0], error));
  stream.impl = ocp_ort_stream_view(defaults[0], &error);
  CHECK(ocp_ort_stream(&stream) == defaults[0]);
  CHECK_OK(ocp_stream_adopt(ocp_device_find(true, 1), NULL, &defaults[1], error));
  other.impl = ocp_ort_stream_view(defaults[1], &error);
  CHECK(defaults[0]->handle == defaults[1]->handle);
  CHECK(ocp_ort_stream(&stream) == defaults[0] && ocp_ort_stream(&other) == defaults[1]);
  ocp_stream_release(defaults[0]);
  ocp_stream_release(defaults[1]);
}

static void test_a_consumer_waits_for_the_producer(void) {
  const int64_t dims[] = {1 << 16};
  float *host = calloc(2 << 16, sizeof *host);
  OrtSyncStream producer = make_stream(), consumer = make_stream();
  OrtValue pinned = mock_tensor(pinned_allocator, pinned_memory, FLOAT, 1, dims);
  OrtValue a = mock_tensor(device_allocator, device_memory, FLOAT, 1, dims);
  OrtValue b = mock_tensor(device_allocator, device_memory, FLOAT, 1, dims);
  OrtValue back = mock_tensor(pinned_allocator, pinned_memory, FLOAT, 1, dims);
  OrtSyncNotificationImpl *notification = NULL, *again = NULL;
  check_ok(producer.impl->CreateNotification(producer.impl, &notification));
  check_ok(consumer.impl->CreateNotification(consumer.impl, &again));
  check_ok(notification->WaitOnHost(notification)); /* the event was never recorded, so there is nothing to wait for */
  for (int round = 1; round <= 5; round++) {
    for (int i = 0; i < dims[0]; i++)
      ((float *)pinned.data)[i] = (float)(i + round);
    copy(&pinned, &a, &producer);
    check_ok(notification->Activate(notification));
    check_ok(notification->WaitOnDevice(notification, &consumer));
    copy(&a, &b, &consumer);
    copy(&b, &back, &consumer);
    check_ok(again->Activate(again));
    check_ok(again->WaitOnHost(again));
    for (int i = 0; i < dims[0]; i++)
      CHECK(((float *)back.data)[i] == (float)(i + round));
  }
  check_ok(notification->WaitOnDevice(notification, NULL));
  OrtSyncStream foreign = {NULL}; /* a stream of another provider: the host waits instead */
  check_ok(notification->WaitOnDevice(notification, &foreign));
  /* Streams are released before their notifications, with unfinished work. */
  copy(&a, &b, &producer);
  check_ok(notification->Activate(notification));
  producer.impl->Release(producer.impl);
  check_ok(notification->WaitOnDevice(notification, &consumer));
  check_ok(notification->Activate(notification));
  consumer.impl->Release(consumer.impl);
  check_ok(again->WaitOnHost(again));
  notification->Release(notification);
  again->Release(again);
  OrtValue *all[] = {&pinned, &a, &b, &back};
  for (int i = 0; i < 4; i++)
    mock_free(all[i]);
  free(host);
}

static OrtStatus *add_no_kernels(OrtKernelRegistry *registry, const char *ep_name, int64_t operators) {
  CHECK(registry->count > 2 && *ep_name && !operators); /* at least the kernels of copies and control flow */
  return NULL;
}

static int build_no_variant(int64_t cluster, const ocp_input *inputs, uint32_t num_inputs, const int64_t *host_values,
                            const uint32_t *host_counts, uint32_t num_host_inputs, ocp_error *failure) {
  (void)cluster, (void)inputs, (void)num_inputs, (void)host_values, (void)host_counts, (void)num_host_inputs;
  return ocp_fail(failure, ORT_FAIL, "there is no Python here");
}

static void test_memcpy_kernels_copy_on_the_stream(ocp_identity identity) {
  const OrtKernelRegistry *registry = NULL;
  const ocp_python python = {.abi = OCP_CORE_ABI, .add_kernels = add_no_kernels, .build_variant = build_no_variant};
  CHECK_OK(ocp_set_python(&python, error));
  CHECK_OK(ocp_kernel_registry(identity, 0, &registry, error));
  CHECK(registry->count >= 2);
  const int64_t dims[] = {4, 4};
  float there[16], back[16];
  for (int i = 0; i < 16; i++)
    there[i] = (float)i;
  OrtSyncStream stream = make_stream();
  OrtValue input = mock_wrap(there, mock_cpu, FLOAT, 2, dims);
  for (int with_stream = 0; with_stream < 2; with_stream++) {
    OrtKernelContext to_device = {.num_inputs = 1,
                                  .num_outputs = 1,
                                  .inputs = {&input},
                                  .allocator = device_allocator,
                                  .output_device = device_memory,
                                  .stream = with_stream ? &stream : NULL};
    OrtKernelContext to_host = {.num_inputs = 1,
                                .num_outputs = 1,
                                .inputs = {&to_device.outputs[0]},
                                .allocator = pinned_allocator,
                                .output_device = pinned_memory,
                                .stream = with_stream ? &stream : NULL};
    OrtKernelContext *contexts[] = {&to_device, &to_host};
    for (size_t i = 0; i < 2; i++) {
      const OrtKernelDef *definition = &registry->definitions[i];
      CHECK(strcmp(definition->op_type, i ? "MemcpyToHost" : "MemcpyFromHost") == 0);
      CHECK(strcmp(definition->ep, ocp_ep_names[identity]) == 0 && definition->num_types > 15);
      CHECK(i ? definition->output_memory == OrtMemTypeCPUOutput : definition->input_memory[0] == OrtMemTypeCPUInput);
      OrtKernelImpl *kernel = NULL;
      check_ok(registry->create[i](NULL, NULL, &kernel));
      check_ok(kernel->Compute(kernel, contexts[i]));
      kernel->Release(kernel);
    }
    finish_run(&stream);
    memcpy(back, to_host.outputs[0].data, sizeof back);
    CHECK(memcmp(there, back, sizeof back) == 0);
    mock_free(&to_device.outputs[0]);
    mock_free(&to_host.outputs[0]);
    OrtKernelContext refused = to_device;
    refused.refuse_outputs = true;
    OrtKernelImpl *kernel = NULL;
    check_ok(registry->create[0](NULL, NULL, &kernel));
    check_fails(kernel->Compute(kernel, &refused), "no memory for the output");
    kernel->Release(kernel);
  }
  stream.impl->Release(stream.impl);
}

/* ---- main ---- */

static void *read_file(const char *path, size_t *bytes) {
  FILE *file = fopen(path, "rb");
  CHECK(file && fseek(file, 0, SEEK_END) == 0);
  *bytes = (size_t)ftell(file);
  rewind(file);
  void *data = malloc(*bytes);
  CHECK(data && fread(data, 1, *bytes, file) == *bytes);
  fclose(file);
  return data;
}

static int64_t counter(ocp_counter which) { return atomic_load(&ocp_counters[which]); }

/* One registration of the library: creates, uses and releases everything. */
static void run_round(const void *image, size_t bytes, uint32_t version, int runs, const OrtKeyValuePairs *options) {
  mock_ort_install(version);
  factory = ocp_factory_create("mock", &(ocp_registration_request){.identity = OCP_IDENTITY_OWN, .emulated = true});
  CHECK(factory);
  device_allocator = make_allocator_with(device_memory, options);
  pinned_allocator = make_allocator(pinned_memory);
  check_ok(factory->CreateDataTransfer(factory, &transfer));
  if (!ocp_python_is_ready()) /* in the first round */
    test_slots_that_need_python_say_that_it_is_missing();
  test_memory_that_is_not_ours_is_refused();
  test_a_data_transfer_claims_only_memory_of_one_kind_of_device();
  test_copies_that_cannot_be_say_why();
  test_free_takes_any_address();
  test_allocators_tell_their_statistics();
  test_an_allocator_for_initializers_bypasses_the_arena();
  test_memory_that_is_too_large_is_refused_and_logged();
  test_memory_for_streams_that_do_not_fit();
  test_tensors_survive_a_way_through_all_memories();
  test_tensors_go_from_device_to_device();
  test_an_allocation_of_a_pool_is_work_of_its_stream();
  test_streams_are_known_by_their_handles();
  test_a_consumer_waits_for_the_producer();
  test_memcpy_kernels_copy_on_the_stream(OCP_IDENTITY_OWN);
  test_memcpy_kernels_copy_on_the_stream(OCP_IDENTITY_CUDA);
  test_sessions(image, bytes, runs);
  transfer->Release(transfer);
  factory->ReleaseAllocator(factory, device_allocator);
  factory->ReleaseAllocator(factory, pinned_allocator);
  ocp_factory_close(factory);
  CHECK(counter(OCP_DEVICE_BYTES_IN_USE) == 0 && counter(OCP_PINNED_BYTES_IN_USE) == 0);
  CHECK(counter(OCP_STREAMS_LIVE) == 0);
  CHECK(atomic_load(&mock_live_statuses) == 0);
  check_elsewhere();
}

int main(int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: mock_host KERNELS.o [inline|adversarial] [seed] [runs]\n");
    return 2;
  }
  ocp_emu_config config;
  ocp_emu_get_config(&config);
  config.num_devices = 2;
  config.workers = 2;
  config.device_bytes = (uint64_t)64 << 20;
  config.adversarial = argc > 2 && strcmp(argv[2], "adversarial") == 0;
  config.seed = argc > 3 ? (uint64_t)atoi(argv[3]) : 1;
  char text[256] = "";
  CHECK(ocp_emu_configure(&config, text, sizeof text) == 0);
  size_t bytes = 0;
  void *image = read_file(argv[1], &bytes);
  mock_ort_install(OCP_NEWEST_API);
  device_memory = mock_device(ocp_vendor_id(true), 0, OrtDeviceMemoryType_DEFAULT);
  pinned_memory = mock_device(ocp_vendor_id(true), 0, OrtDeviceMemoryType_HOST_ACCESSIBLE);
  other_device_memory = mock_device(ocp_vendor_id(true), 1, OrtDeviceMemoryType_DEFAULT);
  ocp_error error = {0};
  device = ocp_device_open(true, 0, &error);
  CHECK(device);
  CUdevice other;
  CHECK(device->driver->DeviceGet(&other, 1) == CUDA_SUCCESS);
  CHECK(device->driver->DevicePrimaryCtxRetain(&host_context, other) == CUDA_SUCCESS);
  be_elsewhere(host_context);
  int runs = argc > 4 ? atoi(argv[4]) : 100;
  static const OrtKeyValuePairs mempool = {.count = 1, .keys = {"arena.use_cuda_mempool"}, .values = {"1"}};
  run_round(image, bytes, OCP_NEWEST_API, runs, NULL);
  run_round(image, bytes, OCP_OLDEST_API, runs / 4 + 1, NULL);
  run_round(image, bytes, OCP_NEWEST_API, runs / 2 + 1, &mempool);
  /* Fails if anything was not freed: the emulator then refuses a new configuration. */
  if (ocp_emu_configure(&config, text, sizeof text) != 0) {
    fprintf(stderr, "%s\n", text);
    return 1;
  }
  free(image);
  puts("mock_host passed");
  return 0;
}
