"""The enums of ONNX Runtime's C ABI, the callback structs that the plugin implements, and structs that are parameters.

``CALLBACK_STRUCTS`` are complete, with their members in order. Each line has the API version that added the member, and
its C declaration::

    since declaration
"""

from __future__ import annotations

from typing import Final

ENUMS: Final[dict[str, str]] = {
    "OrtErrorCode": """
        ORT_OK=0, ORT_FAIL=1, ORT_INVALID_ARGUMENT=2, ORT_NO_SUCHFILE=3, ORT_NO_MODEL=4, ORT_ENGINE_ERROR=5,
        ORT_RUNTIME_EXCEPTION=6, ORT_INVALID_PROTOBUF=7, ORT_MODEL_LOADED=8, ORT_NOT_IMPLEMENTED=9,
        ORT_INVALID_GRAPH=10, ORT_EP_FAIL=11, ORT_MODEL_LOAD_CANCELED=12, ORT_MODEL_REQUIRES_COMPILATION=13,
        ORT_NOT_FOUND=14, ORT_DEVICE_RESET=15
    """,
    "ONNXTensorElementDataType": """
        ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED=0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT=1,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8=2, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8=3,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16=4, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16=5,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32=6, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64=7,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING=8, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL=9,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16=10, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE=11,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32=12, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64=13,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_COMPLEX64=14, ONNX_TENSOR_ELEMENT_DATA_TYPE_COMPLEX128=15,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16=16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN=17,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FNUZ=18, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2=19,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2FNUZ=20, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4=21,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4=22, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT4E2M1=23,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT2=24, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT2=25,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E8M0=26
    """,
    "OrtDeviceEpIncompatibilityReason": """
        OrtDeviceEpIncompatibility_NONE=0, OrtDeviceEpIncompatibility_DRIVER_INCOMPATIBLE=1,
        OrtDeviceEpIncompatibility_DEVICE_INCOMPATIBLE=2, OrtDeviceEpIncompatibility_MISSING_DEPENDENCY=4
    """,
    "OrtResourceCountKind": """
        OrtResourceCountKind_None=0, OrtResourceCountKind_TotalBytes=1
    """,
    "ONNXType": """
        ONNX_TYPE_UNKNOWN=0, ONNX_TYPE_TENSOR=1, ONNX_TYPE_SEQUENCE=2, ONNX_TYPE_MAP=3, ONNX_TYPE_OPAQUE=4,
        ONNX_TYPE_SPARSETENSOR=5, ONNX_TYPE_OPTIONAL=6
    """,
    "OrtLoggingLevel": """
        ORT_LOGGING_LEVEL_VERBOSE=0, ORT_LOGGING_LEVEL_INFO=1, ORT_LOGGING_LEVEL_WARNING=2,
        ORT_LOGGING_LEVEL_ERROR=3, ORT_LOGGING_LEVEL_FATAL=4
    """,
    "OrtOpAttrType": """
        ORT_OP_ATTR_UNDEFINED=0, ORT_OP_ATTR_INT=1, ORT_OP_ATTR_INTS=2, ORT_OP_ATTR_FLOAT=3,
        ORT_OP_ATTR_FLOATS=4, ORT_OP_ATTR_STRING=5, ORT_OP_ATTR_STRINGS=6, ORT_OP_ATTR_GRAPH=7,
        ORT_OP_ATTR_TENSOR=8
    """,
    "OrtCustomOpInputOutputCharacteristic": """
        INPUT_OUTPUT_REQUIRED=0, INPUT_OUTPUT_OPTIONAL=1, INPUT_OUTPUT_VARIADIC=2
    """,
    "GraphOptimizationLevel": """
        ORT_DISABLE_ALL=0, ORT_ENABLE_BASIC=1, ORT_ENABLE_EXTENDED=2, ORT_ENABLE_LAYOUT=3, ORT_ENABLE_ALL=99
    """,
    "ExecutionMode": "ORT_SEQUENTIAL=0, ORT_PARALLEL=1",
    "OrtAllocatorType": "OrtInvalidAllocator=-1, OrtDeviceAllocator=0, OrtArenaAllocator=1, OrtReadOnlyAllocator=2",
    "OrtMemType": "OrtMemTypeCPUInput=-2, OrtMemTypeCPUOutput=-1, OrtMemTypeCPU=-1, OrtMemTypeDefault=0",
    "OrtDeviceMemoryType": "OrtDeviceMemoryType_DEFAULT=0, OrtDeviceMemoryType_HOST_ACCESSIBLE=5",
    "OrtMemoryInfoDeviceType": """
        OrtMemoryInfoDeviceType_CPU=0, OrtMemoryInfoDeviceType_GPU=1, OrtMemoryInfoDeviceType_FPGA=2,
        OrtMemoryInfoDeviceType_NPU=3
    """,
    "OrtHardwareDeviceType": "OrtHardwareDeviceType_CPU=0, OrtHardwareDeviceType_GPU=1, OrtHardwareDeviceType_NPU=2",
    "OrtCompiledModelCompatibility": """
        OrtCompiledModelCompatibility_EP_NOT_APPLICABLE=0,
        OrtCompiledModelCompatibility_EP_SUPPORTED_OPTIMAL=1,
        OrtCompiledModelCompatibility_EP_SUPPORTED_PREFER_RECOMPILATION=2,
        OrtCompiledModelCompatibility_EP_UNSUPPORTED=3
    """,
    "OrtProfilingEventCategory": """
        OrtProfilingEventCategory_SESSION=0, OrtProfilingEventCategory_NODE=1,
        OrtProfilingEventCategory_KERNEL=2, OrtProfilingEventCategory_API=3
    """,
    "OrtEpDataLayout": "OrtEpDataLayout_NCHW=0, OrtEpDataLayout_NHWC=1, OrtEpDataLayout_Default=0",
    "OrtGraphCaptureNodeAssignmentPolicy": """
        OrtGraphCaptureNodeAssignmentPolicy_ALL_NODES_ON_EP=0,
        OrtGraphCaptureNodeAssignmentPolicy_ALLOW_CPU_FOR_SHAPES=1
    """,
    "OrtWeightlessSupport": """
        OrtWeightlessSupport_NONE=0, OrtWeightlessSupport_EXTERNAL_ONLY=1, OrtWeightlessSupport_ALL=2
    """,
    "OrtExternalMemoryHandleType": """
        ORT_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_RESOURCE=0, ORT_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP=1,
        ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_WIN32=2, ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD=3
    """,
    "OrtExternalSemaphoreType": """
        ORT_EXTERNAL_SEMAPHORE_D3D12_FENCE=0, ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_WIN32=1,
        ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD=2
    """,
    "OrtGraphicsApi": "ORT_GRAPHICS_API_NONE=0, ORT_GRAPHICS_API_D3D12=1, ORT_GRAPHICS_API_VULKAN=2",
}

CALLBACK_STRUCTS: Final[dict[str, str]] = {
    "OrtAllocator": """
    1 uint32_t version
    1 void *Alloc(OrtAllocator *this_, size_t size)
    1 void Free(OrtAllocator *this_, void *p)
    1 const OrtMemoryInfo *Info(const OrtAllocator *this_)
    1 void *Reserve(OrtAllocator *this_, size_t size)
    1 OrtStatus *GetStats(const OrtAllocator *this_, OrtKeyValuePairs **out)
    1 void *AllocOnStream(OrtAllocator *this_, size_t size, OrtSyncStream *stream)
    1 OrtStatus *Shrink(OrtAllocator *this_)
    """,
    "OrtDataTransferImpl": """
    1 uint32_t ort_version_supported
    23 void Release(OrtDataTransferImpl *this_ptr)
    23 bool CanCopy(const OrtDataTransferImpl *this_ptr, const OrtMemoryDevice *src_memory_device, const
           OrtMemoryDevice *dst_memory_device)
    23 OrtStatus *CopyTensors(OrtDataTransferImpl *this_ptr, const OrtValue **src_tensors, OrtValue **dst_tensors,
           OrtSyncStream **streams, size_t num_tensors)
    """,
    "OrtSyncNotificationImpl": """
    1 uint32_t ort_version_supported
    23 void Release(OrtSyncNotificationImpl *this_ptr)
    23 OrtStatus *Activate(OrtSyncNotificationImpl *this_ptr)
    23 OrtStatus *WaitOnDevice(OrtSyncNotificationImpl *this_ptr, OrtSyncStream *consumer_stream)
    23 OrtStatus *WaitOnHost(OrtSyncNotificationImpl *this_ptr)
    """,
    "OrtSyncStreamImpl": """
    1 uint32_t ort_version_supported
    23 void Release(OrtSyncStreamImpl *this_ptr)
    23 void *GetHandle(OrtSyncStreamImpl *this_ptr)
    23 OrtStatus *CreateNotification(OrtSyncStreamImpl *this_ptr, OrtSyncNotificationImpl **notification)
    23 OrtStatus *Flush(OrtSyncStreamImpl *this_ptr)
    23 OrtStatus *OnSessionRunEnd(OrtSyncStreamImpl *this_ptr)
    """,
    "OrtEpProfilerImpl": """
    1 uint32_t ort_version_supported
    25 void Release(OrtEpProfilerImpl *this_ptr)
    25 OrtStatus *StartProfiling(OrtEpProfilerImpl *this_ptr, int64_t ep_profiling_start_offset_ns)
    25 OrtStatus *StartEvent(OrtEpProfilerImpl *this_ptr, uint64_t ort_event_correlation_id)
    25 OrtStatus *StopEvent(OrtEpProfilerImpl *this_ptr, uint64_t ort_event_correlation_id, const
           OrtProfilingEvent *ort_event)
    25 OrtStatus *EndProfiling(OrtEpProfilerImpl *this_ptr, OrtProfilingEventsContainer *events_container)
    """,
    "OrtNodeFusionOptions": """
    23 uint32_t ort_version_supported
    23 bool drop_constant_initializers
    """,
    "OrtNodeComputeInfo": """
    23 uint32_t ort_version_supported
    23 OrtStatus *CreateState(OrtNodeComputeInfo *this_ptr, OrtNodeComputeContext *compute_context, void
           **compute_state)
    23 OrtStatus *Compute(OrtNodeComputeInfo *this_ptr, void *compute_state, OrtKernelContext *kernel_context)
    23 void ReleaseState(OrtNodeComputeInfo *this_ptr, void *compute_state)
    """,
    "OrtKernelImpl": """
    1 uint32_t ort_version_supported
    1 uint32_t flags
    24 OrtStatus *Compute(OrtKernelImpl *this_ptr, OrtKernelContext *context)
    24 void Release(OrtKernelImpl *this_ptr)
    24 OrtStatus *PrePackWeight(OrtKernelImpl *this_ptr, const OrtValue *tensor, int input_index, OrtAllocator
           *allocator, OrtSharedPrePackedWeightCache *prepacked_weight_cache, bool *is_packed)
    24 OrtStatus *SetSharedPrePackedWeight(OrtKernelImpl *this_ptr, const void *const *buffer_data_ptrs, const
           size_t *buffer_data_sizes, size_t num_buffers, int input_index)
    """,
    "OrtLoopKernelHelper": """
    1 uint32_t ort_version_supported
    24 void Release(OrtLoopKernelHelper *this_ptr)
    24 OrtStatus *ConcatOutput(OrtLoopKernelHelper *this_ptr, void *stream_handle, const OrtValue *const
           *per_iteration_outputs, size_t num_per_iteration_outputs, void *output, size_t output_size_in_bytes)
    """,
    "OrtScanKernelHelper": """
    1 uint32_t ort_version_supported
    24 void Release(OrtScanKernelHelper *this_ptr)
    24 OrtStatus *Transpose(OrtScanKernelHelper *this_ptr, const size_t *permutation, size_t
           num_permutation_elems, const OrtValue *input, OrtSyncStream *stream, OrtValue *output)
    """,
    "OrtResourceCount": """
    1 uint32_t kind
    1 uint32_t reserved
    1 union { uint64_t total_bytes; uint64_t reserved_words[6]; } value
    """,
    "OrtEp": """
    22 uint32_t ort_version_supported
    22 const char *GetName(const OrtEp *this_ptr)
    23 OrtStatus *GetCapability(OrtEp *this_ptr, const OrtGraph *graph, OrtEpGraphSupportInfo *graph_support_info)
    23 OrtStatus *Compile(OrtEp *this_ptr, const OrtGraph **graphs, const OrtNode **fused_nodes, size_t count,
           OrtNodeComputeInfo **node_compute_infos, OrtNode **ep_context_nodes)
    23 void ReleaseNodeComputeInfos(OrtEp *this_ptr, OrtNodeComputeInfo **node_compute_infos, size_t
           num_node_compute_infos)
    23 OrtStatus *GetPreferredDataLayout(OrtEp *this_ptr, OrtEpDataLayout *preferred_data_layout)
    23 OrtStatus *ShouldConvertDataLayoutForOp(OrtEp *this_ptr, const char *domain, const char *op_type,
           OrtEpDataLayout target_data_layout, int *should_convert)
    23 OrtStatus *SetDynamicOptions(OrtEp *this_ptr, const char *const *option_keys, const char *const
           *option_values, size_t num_options)
    23 OrtStatus *OnRunStart(OrtEp *this_ptr, const OrtRunOptions *run_options)
    23 OrtStatus *OnRunEnd(OrtEp *this_ptr, const OrtRunOptions *run_options, bool sync_stream)
    23 OrtStatus *CreateAllocator(OrtEp *this_ptr, const OrtMemoryInfo *memory_info, OrtAllocator **allocator)
    23 OrtStatus *CreateSyncStreamForDevice(OrtEp *this_ptr, const OrtMemoryDevice *memory_device,
           OrtSyncStreamImpl **stream)
    23 const char *GetCompiledModelCompatibilityInfo(OrtEp *this_ptr, const OrtGraph *graph)
    24 OrtStatus *GetKernelRegistry(OrtEp *this_ptr, const OrtKernelRegistry **kernel_registry)
    24 OrtStatus *IsConcurrentRunSupported(OrtEp *this_ptr, bool *is_supported)
    25 OrtStatus *Sync(OrtEp *this_ptr)
    25 OrtStatus *CreateProfiler(OrtEp *this_ptr, OrtEpProfilerImpl **profiler)
    26 bool IsGraphCaptureEnabled(const OrtEp *this_ptr)
    26 bool IsGraphCaptured(const OrtEp *this_ptr, int graph_annotation_id)
    26 OrtStatus *ReplayGraph(OrtEp *this_ptr, int graph_annotation_id)
    26 OrtGraphCaptureNodeAssignmentPolicy GetGraphCaptureNodeAssignmentPolicy(const OrtEp *this_ptr)
    26 OrtStatus *GetAvailableResource(const OrtEp *this_ptr, OrtResourceCount *available)
    27 OrtStatus *OnSessionInitializationEnd(OrtEp *this_ptr)
    27 OrtStatus *GetDefaultMemoryDevice(const OrtEp *this_ptr, const OrtMemoryDevice **device)
    27 OrtStatus *ReleaseCapturedGraph(OrtEp *this_ptr, int graph_annotation_id)
    29 OrtStatus *GetWeightlessSupport(const OrtEp *this_ptr, OrtWeightlessSupport *support)
    31 OrtStatus *GetEpContextDataSupport(const OrtEp *this_ptr, uint32_t *flags)
    """,
    "OrtEpFactory": """
    22 uint32_t ort_version_supported
    22 const char *GetName(const OrtEpFactory *this_ptr)
    22 const char *GetVendor(const OrtEpFactory *this_ptr)
    22 OrtStatus *GetSupportedDevices(OrtEpFactory *this_ptr, const OrtHardwareDevice *const *devices, size_t
           num_devices, OrtEpDevice **ep_devices, size_t max_ep_devices, size_t *num_ep_devices)
    22 OrtStatus *CreateEp(OrtEpFactory *this_ptr, const OrtHardwareDevice *const *devices, const OrtKeyValuePairs
           *const *ep_metadata_pairs, size_t num_devices, const OrtSessionOptions *session_options, const OrtLogger
           *logger, OrtEp **ep)
    22 void ReleaseEp(OrtEpFactory *this_ptr, OrtEp *ep)
    23 uint32_t GetVendorId(const OrtEpFactory *this_ptr)
    23 const char *GetVersion(const OrtEpFactory *this_ptr)
    23 OrtStatus *ValidateCompiledModelCompatibilityInfo(OrtEpFactory *this_ptr, const OrtHardwareDevice *const
           *devices, size_t num_devices, const char *compatibility_info, OrtCompiledModelCompatibility
           *model_compatibility)
    23 OrtStatus *CreateAllocator(OrtEpFactory *this_ptr, const OrtMemoryInfo *memory_info, const OrtKeyValuePairs
           *allocator_options, OrtAllocator **allocator)
    23 void ReleaseAllocator(OrtEpFactory *this_ptr, OrtAllocator *allocator)
    23 OrtStatus *CreateDataTransfer(OrtEpFactory *this_ptr, OrtDataTransferImpl **data_transfer)
    23 bool IsStreamAware(const OrtEpFactory *this_ptr)
    23 OrtStatus *CreateSyncStreamForDevice(OrtEpFactory *this_ptr, const OrtMemoryDevice *memory_device, const
           OrtKeyValuePairs *stream_options, OrtSyncStreamImpl **stream)
    24 OrtStatus *GetHardwareDeviceIncompatibilityDetails(OrtEpFactory *this_ptr, const OrtHardwareDevice *hw,
           OrtDeviceEpIncompatibilityDetails *details)
    24 OrtStatus *CreateExternalResourceImporterForDevice(OrtEpFactory *this_ptr, const OrtEpDevice *ep_device,
           OrtExternalResourceImporterImpl **out_importer)
    24 OrtStatus *GetNumCustomOpDomains(OrtEpFactory *this_ptr, size_t *num_domains)
    24 OrtStatus *GetCustomOpDomains(OrtEpFactory *this_ptr, OrtCustomOpDomain **domains, size_t num_domains)
    25 OrtStatus *InitGraphicsInterop(OrtEpFactory *this_ptr, const OrtEpDevice *ep_device, const
           OrtGraphicsInteropConfig *config)
    25 OrtStatus *DeinitGraphicsInterop(OrtEpFactory *this_ptr, const OrtEpDevice *ep_device)
    28 OrtStatus *SelectBestModelCandidate(OrtEpFactory *this_ptr, const OrtHardwareDevice *device, const
           OrtKeyValuePairs *const *candidates, size_t num_candidates, const OrtSessionOptions *session_options,
           size_t *selected_index)
    """,
    "OrtCustomOp": """
    1 uint32_t version
    1 void *CreateKernel(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info)
    1 const char *GetName(const OrtCustomOp *op)
    1 const char *GetExecutionProviderType(const OrtCustomOp *op)
    1 ONNXTensorElementDataType GetInputType(const OrtCustomOp *op, size_t index)
    1 size_t GetInputTypeCount(const OrtCustomOp *op)
    1 ONNXTensorElementDataType GetOutputType(const OrtCustomOp *op, size_t index)
    1 size_t GetOutputTypeCount(const OrtCustomOp *op)
    1 void KernelCompute(void *op_kernel, OrtKernelContext *context)
    1 void KernelDestroy(void *op_kernel)
    8 OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(const OrtCustomOp *op, size_t index)
    8 OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(const OrtCustomOp *op, size_t index)
    13 OrtMemType GetInputMemoryType(const OrtCustomOp *op, size_t index)
    14 int GetVariadicInputMinArity(const OrtCustomOp *op)
    14 int GetVariadicInputHomogeneity(const OrtCustomOp *op)
    14 int GetVariadicOutputMinArity(const OrtCustomOp *op)
    14 int GetVariadicOutputHomogeneity(const OrtCustomOp *op)
    16 OrtStatus *CreateKernelV2(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel)
    16 OrtStatus *KernelComputeV2(void *op_kernel, OrtKernelContext *context)
    17 OrtStatus *InferOutputShapeFn(const OrtCustomOp *op, OrtShapeInferContext *context)
    17 int GetStartVersion(const OrtCustomOp *op)
    17 int GetEndVersion(const OrtCustomOp *op)
    18 size_t GetMayInplace(int **input_index, int **output_index)
    18 void ReleaseMayInplace(int *input_index, int *output_index)
    18 size_t GetAliasMap(int **input_index, int **output_index)
    18 void ReleaseAliasMap(int *input_index, int *output_index)
    """,
    "OrtExternalMemoryDescriptor": """
    24 uint32_t version
    24 OrtExternalMemoryHandleType handle_type
    24 void *native_handle
    24 size_t size_bytes
    24 size_t offset_bytes
    """,
    "OrtExternalSemaphoreDescriptor": """
    24 uint32_t version
    24 OrtExternalSemaphoreType type
    24 void *native_handle
    """,
    "OrtExternalTensorDescriptor": """
    24 uint32_t version
    24 ONNXTensorElementDataType element_type
    24 const int64_t *shape
    24 size_t rank
    24 size_t offset_bytes
    """,
    "OrtGraphicsInteropConfig": """
    25 uint32_t version
    25 OrtGraphicsApi graphics_api
    25 void *command_queue
    25 const OrtKeyValuePairs *additional_options
    """,
    "OrtExternalMemoryHandle": """
    24 uint32_t version
    24 const OrtEpDevice *ep_device
    24 OrtExternalMemoryDescriptor descriptor
    24 void Release(OrtExternalMemoryHandle *handle)
    """,
    "OrtExternalSemaphoreHandle": """
    24 uint32_t version
    24 const OrtEpDevice *ep_device
    24 OrtExternalSemaphoreDescriptor descriptor
    24 void Release(OrtExternalSemaphoreHandle *handle)
    """,
    "OrtExternalResourceImporterImpl": """
    24 uint32_t ort_version_supported
    24 bool CanImportMemory(const OrtExternalResourceImporterImpl *this_ptr, OrtExternalMemoryHandleType handle_type)
    24 OrtStatus *ImportMemory(OrtExternalResourceImporterImpl *this_ptr, const OrtExternalMemoryDescriptor *desc,
           OrtExternalMemoryHandle **out_handle)
    24 void ReleaseMemory(OrtExternalResourceImporterImpl *this_ptr, OrtExternalMemoryHandle *handle)
    24 OrtStatus *CreateTensorFromMemory(OrtExternalResourceImporterImpl *this_ptr, const OrtExternalMemoryHandle
           *mem_handle, const OrtExternalTensorDescriptor *tensor_desc, OrtValue **out_tensor)
    24 bool CanImportSemaphore(const OrtExternalResourceImporterImpl *this_ptr, OrtExternalSemaphoreType type)
    24 OrtStatus *ImportSemaphore(OrtExternalResourceImporterImpl *this_ptr, const OrtExternalSemaphoreDescriptor
           *desc, OrtExternalSemaphoreHandle **out_handle)
    24 void ReleaseSemaphore(OrtExternalResourceImporterImpl *this_ptr, OrtExternalSemaphoreHandle *handle)
    24 OrtStatus *WaitSemaphore(OrtExternalResourceImporterImpl *this_ptr, OrtExternalSemaphoreHandle *handle,
           OrtSyncStream *stream, uint64_t value)
    24 OrtStatus *SignalSemaphore(OrtExternalResourceImporterImpl *this_ptr, OrtExternalSemaphoreHandle *handle,
           OrtSyncStream *stream, uint64_t value)
    24 void Release(OrtExternalResourceImporterImpl *this_ptr)
    """,
}
