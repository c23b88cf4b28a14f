"""Function tables of ONNX Runtime's C ABI, as far as an execution provider needs them, and the supported API versions.

Each line declares a function::

    slot since declaration

``slot`` is the function's index in its table, ``since`` the API version (the N of ONNX Runtime 1.N) that added it. For
a function that releases objects, ``since`` may be 1 although a later version added it. A line that does not begin with
a number continues the line before it. Slots that are not listed become reserved space. ``abi.declarations`` turns these
tables into C.
"""

from __future__ import annotations

from typing import Final

#: Oldest and newest API version that the plugin requests: it requests min(NEWEST_API, version of the host). If the host
#: is newer, the plugin also calls some functions of newer versions.
OLDEST_API: Final = 26
NEWEST_API: Final = 30

FUNCTION_TABLES: Final[dict[str, str]] = {
    "OrtApiBase": """
    0 1 const OrtApi *GetApi(uint32_t version)
    1 1 const char *GetVersionString(void)
    """,
    "OrtApi": """
    0 1 OrtStatus *CreateStatus(OrtErrorCode code, const char *msg)
    1 1 OrtErrorCode GetErrorCode(const OrtStatus *status)
    2 1 const char *GetErrorMessage(const OrtStatus *status)
    3 1 OrtStatus *CreateEnv(OrtLoggingLevel log_severity_level, const char *logid, OrtEnv **out)
    7 1 OrtStatus *CreateSession(const OrtEnv *env, const char *model_path, const OrtSessionOptions *options,
            OrtSession **out)
    8 1 OrtStatus *CreateSessionFromArray(const OrtEnv *env, const void *model_data, size_t model_data_length,
            const OrtSessionOptions *options, OrtSession **out)
    9 1 OrtStatus *Run(OrtSession *session, const OrtRunOptions *run_options, const char *const *input_names,
            const OrtValue *const *inputs, size_t input_len, const char *const *output_names, size_t output_names_len,
            OrtValue **outputs)
    10 1 OrtStatus *CreateSessionOptions(OrtSessionOptions **options)
    11 1 OrtStatus *SetOptimizedModelFilePath(OrtSessionOptions *options, const char *optimized_model_filepath)
    13 1 OrtStatus *SetSessionExecutionMode(OrtSessionOptions *options, ExecutionMode execution_mode)
    23 1 OrtStatus *SetSessionGraphOptimizationLevel(OrtSessionOptions *options, GraphOptimizationLevel
             graph_optimization_level)
    24 1 OrtStatus *SetIntraOpNumThreads(OrtSessionOptions *options, int intra_op_num_threads)
    26 1 OrtStatus *CreateCustomOpDomain(const char *domain, OrtCustomOpDomain **out)
    27 1 OrtStatus *CustomOpDomain_Add(OrtCustomOpDomain *custom_op_domain, const OrtCustomOp *op)
    28 1 OrtStatus *AddCustomOpDomain(OrtSessionOptions *options, OrtCustomOpDomain *custom_op_domain)
    30 1 OrtStatus *SessionGetInputCount(const OrtSession *session, size_t *out)
    31 1 OrtStatus *SessionGetOutputCount(const OrtSession *session, size_t *out)
    36 1 OrtStatus *SessionGetInputName(const OrtSession *session, size_t index, OrtAllocator *allocator, char
             **value)
    37 1 OrtStatus *SessionGetOutputName(const OrtSession *session, size_t index, OrtAllocator *allocator, char
             **value)
    39 1 OrtStatus *CreateRunOptions(OrtRunOptions **out)
    45 1 OrtStatus *RunOptionsGetRunTag(const OrtRunOptions *options, const char **run_tag)
    46 1 OrtStatus *RunOptionsSetTerminate(OrtRunOptions *options)
    47 1 OrtStatus *RunOptionsUnsetTerminate(OrtRunOptions *options)
    48 1 OrtStatus *CreateTensorAsOrtValue(OrtAllocator *allocator, const int64_t *shape, size_t shape_len,
             ONNXTensorElementDataType type, OrtValue **out)
    49 1 OrtStatus *CreateTensorWithDataAsOrtValue(const OrtMemoryInfo *info, void *p_data, size_t p_data_len,
             const int64_t *shape, size_t shape_len, ONNXTensorElementDataType type, OrtValue **out)
    50 1 OrtStatus *IsTensor(const OrtValue *value, int *out)
    51 1 OrtStatus *GetTensorMutableData(OrtValue *value, void **out)
    53 1 OrtStatus *GetStringTensorDataLength(const OrtValue *value, size_t *len)
    54 1 OrtStatus *GetStringTensorContent(const OrtValue *value, void *s, size_t s_len, size_t *offsets, size_t
             offsets_len)
    55 1 OrtStatus *CastTypeInfoToTensorInfo(const OrtTypeInfo *type_info, const OrtTensorTypeAndShapeInfo **out)
    56 1 OrtStatus *GetOnnxTypeFromTypeInfo(const OrtTypeInfo *type_info, ONNXType *out)
    57 1 OrtStatus *CreateTensorTypeAndShapeInfo(OrtTensorTypeAndShapeInfo **out)
    58 1 OrtStatus *SetTensorElementType(OrtTensorTypeAndShapeInfo *info, ONNXTensorElementDataType type)
    59 1 OrtStatus *SetDimensions(OrtTensorTypeAndShapeInfo *info, const int64_t *dim_values, size_t dim_count)
    60 1 OrtStatus *GetTensorElementType(const OrtTensorTypeAndShapeInfo *info, ONNXTensorElementDataType *out)
    61 1 OrtStatus *GetDimensionsCount(const OrtTensorTypeAndShapeInfo *info, size_t *out)
    62 1 OrtStatus *GetDimensions(const OrtTensorTypeAndShapeInfo *info, int64_t *dim_values, size_t
             dim_values_length)
    63 1 OrtStatus *GetSymbolicDimensions(const OrtTensorTypeAndShapeInfo *info, const char *dim_params[], size_t
             dim_params_length)
    64 1 OrtStatus *GetTensorShapeElementCount(const OrtTensorTypeAndShapeInfo *info, size_t *out)
    65 1 OrtStatus *GetTensorTypeAndShape(const OrtValue *value, OrtTensorTypeAndShapeInfo **out)
    66 1 OrtStatus *GetTypeInfo(const OrtValue *value, OrtTypeInfo **out)
    67 1 OrtStatus *GetValueType(const OrtValue *value, ONNXType *out)
    68 1 OrtStatus *CreateMemoryInfo(const char *name, OrtAllocatorType type, int id, OrtMemType mem_type,
             OrtMemoryInfo **out)
    69 1 OrtStatus *CreateCpuMemoryInfo(OrtAllocatorType type, OrtMemType mem_type, OrtMemoryInfo **out)
    70 1 OrtStatus *CompareMemoryInfo(const OrtMemoryInfo *info1, const OrtMemoryInfo *info2, int *out)
    71 1 OrtStatus *MemoryInfoGetName(const OrtMemoryInfo *ptr, const char **out)
    72 1 OrtStatus *MemoryInfoGetId(const OrtMemoryInfo *ptr, int *out)
    73 1 OrtStatus *MemoryInfoGetMemType(const OrtMemoryInfo *ptr, OrtMemType *out)
    74 1 OrtStatus *MemoryInfoGetType(const OrtMemoryInfo *ptr, OrtAllocatorType *out)
    75 1 OrtStatus *AllocatorAlloc(OrtAllocator *ort_allocator, size_t size, void **out)
    76 1 OrtStatus *AllocatorFree(OrtAllocator *ort_allocator, void *p)
    77 1 OrtStatus *AllocatorGetInfo(const OrtAllocator *ort_allocator, const OrtMemoryInfo **out)
    78 1 OrtStatus *GetAllocatorWithDefaultOptions(OrtAllocator **out)
    80 1 OrtStatus *GetValue(const OrtValue *value, int index, OrtAllocator *allocator, OrtValue **out)
    81 1 OrtStatus *GetValueCount(const OrtValue *value, size_t *out)
    85 1 OrtStatus *KernelInfoGetAttribute_float(const OrtKernelInfo *info, const char *name, float *out)
    86 1 OrtStatus *KernelInfoGetAttribute_int64(const OrtKernelInfo *info, const char *name, int64_t *out)
    87 1 OrtStatus *KernelInfoGetAttribute_string(const OrtKernelInfo *info, const char *name, char *out, size_t
             *size)
    88 1 OrtStatus *KernelContext_GetInputCount(const OrtKernelContext *context, size_t *out)
    89 1 OrtStatus *KernelContext_GetOutputCount(const OrtKernelContext *context, size_t *out)
    90 1 OrtStatus *KernelContext_GetInput(const OrtKernelContext *context, size_t index, const OrtValue **out)
    91 1 OrtStatus *KernelContext_GetOutput(OrtKernelContext *context, size_t index, const int64_t *dim_values,
             size_t dim_count, OrtValue **out)
    92 1 void ReleaseEnv(OrtEnv *input)
    93 1 void ReleaseStatus(OrtStatus *input)
    94 1 void ReleaseMemoryInfo(OrtMemoryInfo *input)
    95 1 void ReleaseSession(OrtSession *input)
    96 1 void ReleaseValue(OrtValue *input)
    97 1 void ReleaseRunOptions(OrtRunOptions *input)
    98 1 void ReleaseTypeInfo(OrtTypeInfo *input)
    99 1 void ReleaseTensorTypeAndShapeInfo(OrtTensorTypeAndShapeInfo *input)
    100 1 void ReleaseSessionOptions(OrtSessionOptions *input)
    104 1 OrtStatus *CastTypeInfoToSequenceTypeInfo(const OrtTypeInfo *type_info, const OrtSequenceTypeInfo **out)
    107 1 OrtStatus *GetSequenceElementType(const OrtSequenceTypeInfo *sequence_type_info, OrtTypeInfo
              **type_info)
    116 1 OrtStatus *ModelMetadataLookupCustomMetadataMap(const OrtModelMetadata *model_metadata, OrtAllocator
              *allocator, const char *key, char **value)
    118 1 void ReleaseModelMetadata(OrtModelMetadata *input)
    125 1 OrtStatus *GetAvailableProviders(char ***out_ptr, int *provider_length)
    126 1 OrtStatus *ReleaseAvailableProviders(char **ptr, int providers_length)
    127 1 OrtStatus *GetStringTensorElementLength(const OrtValue *value, size_t index, size_t *out)
    128 1 OrtStatus *GetStringTensorElement(const OrtValue *value, size_t s_len, size_t index, void *s)
    130 1 OrtStatus *AddSessionConfigEntry(OrtSessionOptions *options, const char *config_key, const char
              *config_value)
    131 1 OrtStatus *CreateAllocator(const OrtSession *session, const OrtMemoryInfo *mem_info, OrtAllocator **out)
    132 23 void ReleaseAllocator(OrtAllocator *input)
    133 1 OrtStatus *RunWithBinding(OrtSession *session, const OrtRunOptions *run_options, const OrtIoBinding
              *binding_ptr)
    134 1 OrtStatus *CreateIoBinding(OrtSession *session, OrtIoBinding **out)
    135 1 void ReleaseIoBinding(OrtIoBinding *input)
    136 1 OrtStatus *BindInput(OrtIoBinding *binding_ptr, const char *name, const OrtValue *val_ptr)
    137 1 OrtStatus *BindOutput(OrtIoBinding *binding_ptr, const char *name, const OrtValue *val_ptr)
    138 1 OrtStatus *BindOutputToDevice(OrtIoBinding *binding_ptr, const char *name, const OrtMemoryInfo
              *mem_info_ptr)
    140 1 OrtStatus *GetBoundOutputValues(const OrtIoBinding *binding_ptr, OrtAllocator *allocator, OrtValue **
              *output, size_t *output_count)
    141 1 void ClearBoundInputs(OrtIoBinding *binding_ptr)
    142 1 void ClearBoundOutputs(OrtIoBinding *binding_ptr)
    162 1 OrtStatus *KernelInfoGetAttributeArray_float(const OrtKernelInfo *info, const char *name, float *out,
              size_t *size)
    163 1 OrtStatus *KernelInfoGetAttributeArray_int64(const OrtKernelInfo *info, const char *name, int64_t *out,
              size_t *size)
    165 1 OrtStatus *AddRunConfigEntry(OrtRunOptions *options, const char *config_key, const char *config_value)
    168 1 OrtStatus *CreateSessionWithPrepackedWeightsContainer(const OrtEnv *env, const char *model_path, const
            OrtSessionOptions *options, OrtPrepackedWeightsContainer *prepacked_weights_container, OrtSession **out)
    169 1 OrtStatus *CreateSessionFromArrayWithPrepackedWeightsContainer(const OrtEnv *env, const void *model_data,
            size_t model_data_length, const OrtSessionOptions *options, OrtPrepackedWeightsContainer
            *prepacked_weights_container, OrtSession **out)
    192 1 OrtStatus *HasValue(const OrtValue *value, int *out)
    193 1 OrtStatus *KernelContext_GetGPUComputeStream(const OrtKernelContext *context, void **out)
    194 1 OrtStatus *GetTensorMemoryInfo(const OrtValue *value, const OrtMemoryInfo **mem_info)
    195 1 OrtStatus *GetExecutionProviderApi(const char *provider_name, uint32_t version, const void
              **provider_api)
    202 1 OrtStatus *SynchronizeBoundInputs(OrtIoBinding *binding_ptr)
    203 1 OrtStatus *SynchronizeBoundOutputs(OrtIoBinding *binding_ptr)
    211 12 OrtStatus *CreateOpAttr(const char *name, const void *data, int len, OrtOpAttrType type, OrtOpAttr **op_attr)
    212 1 void ReleaseOpAttr(OrtOpAttr *input)
    216 12 OrtStatus *SessionOptionsAppendExecutionProvider(OrtSessionOptions *options, const char *provider_name,
               const char *const *provider_options_keys, const char *const *provider_options_values, size_t num_keys)
    225 13 void MemoryInfoGetDeviceType(const OrtMemoryInfo *ptr, OrtMemoryInfoDeviceType *out)
    230 14 OrtStatus *KernelInfo_GetInputCount(const OrtKernelInfo *info, size_t *out)
    231 14 OrtStatus *KernelInfo_GetOutputCount(const OrtKernelInfo *info, size_t *out)
    232 14 OrtStatus *KernelInfo_GetInputName(const OrtKernelInfo *info, size_t index, char *out, size_t *size)
    233 14 OrtStatus *KernelInfo_GetOutputName(const OrtKernelInfo *info, size_t index, char *out, size_t *size)
    234 14 OrtStatus *KernelInfo_GetInputTypeInfo(const OrtKernelInfo *info, size_t index, OrtTypeInfo
               **type_info)
    235 14 OrtStatus *KernelInfo_GetOutputTypeInfo(const OrtKernelInfo *info, size_t index, OrtTypeInfo
               **type_info)
    236 1 OrtStatus *KernelInfoGetAttribute_tensor(const OrtKernelInfo *info, const char *name, OrtAllocator
              *allocator, OrtValue **out)
    237 14 OrtStatus *HasSessionConfigEntry(const OrtSessionOptions *options, const char *config_key, int *out)
    238 14 OrtStatus *GetSessionConfigEntry(const OrtSessionOptions *options, const char *config_key, char
               *config_value, size_t *size)
    244 15 OrtStatus *KernelInfo_GetNodeName(const OrtKernelInfo *info, char *out, size_t *size)
    245 15 OrtStatus *KernelInfo_GetLogger(const OrtKernelInfo *info, const OrtLogger **logger)
    246 15 OrtStatus *KernelContext_GetLogger(const OrtKernelContext *context, const OrtLogger **logger)
    247 15 OrtStatus *Logger_LogMessage(const OrtLogger *logger, OrtLoggingLevel log_severity_level, const char
               *message, const char *file_path, int line_number, const char *func_name)
    248 15 OrtStatus *Logger_GetLoggingSeverityLevel(const OrtLogger *logger, OrtLoggingLevel *out)
    249 15 OrtStatus *KernelInfoGetConstantInput_tensor(const OrtKernelInfo *info, size_t index, int *is_constant,
               const OrtValue **out)
    250 15 OrtStatus *CastTypeInfoToOptionalTypeInfo(const OrtTypeInfo *type_info, const OrtOptionalTypeInfo
               **out)
    251 15 OrtStatus *GetOptionalContainedTypeInfo(const OrtOptionalTypeInfo *optional_type_info, OrtTypeInfo
               **out)
    253 15 OrtStatus *KernelContext_GetAllocator(const OrtKernelContext *context, const OrtMemoryInfo *mem_info,
               OrtAllocator **out)
    254 15 const char *GetBuildInfoString(void)
    265 16 OrtStatus *KernelContext_GetResource(const OrtKernelContext *context, int resource_version, int
               resource_id, void **resource)
    267 17 OrtStatus *ShapeInferContext_GetInputCount(const OrtShapeInferContext *context, size_t *out)
    268 17 OrtStatus *ShapeInferContext_GetInputTypeShape(const OrtShapeInferContext *context, size_t index,
              OrtTensorTypeAndShapeInfo **info)
    269 17 OrtStatus *ShapeInferContext_GetAttribute(const OrtShapeInferContext *context, const char
              *attr_name, const OrtOpAttr **attr)
    270 17 OrtStatus *ShapeInferContext_SetOutputTypeShape(const OrtShapeInferContext *context, size_t index, const
              OrtTensorTypeAndShapeInfo *info)
    271 17 OrtStatus *SetSymbolicDimensions(OrtTensorTypeAndShapeInfo *info, const char *dim_params[], size_t
              dim_params_length)
    272 17 OrtStatus *ReadOpAttr(const OrtOpAttr *op_attr, OrtOpAttrType type, void *data, size_t len, size_t
               *out)
    274 17 OrtStatus *KernelContext_ParallelFor(const OrtKernelContext *context, void ( *fn)(void *, size_t),
               size_t total, size_t num_batch, void *usr_data)
    277 18 OrtStatus *KernelContext_GetScratchBuffer(const OrtKernelContext *context, const OrtMemoryInfo
               *mem_info, size_t count_or_bytes, void **out)
    278 18 OrtStatus *KernelInfoGetAllocator(const OrtKernelInfo *info, OrtMemType mem_type, OrtAllocator **out)
    284 20 OrtStatus *SetEpDynamicOptions(OrtSession *sess, const char *const *keys, const char *const *values,
               size_t kv_len)
    285 1 void ReleaseValueInfo(OrtValueInfo *input)
    286 1 void ReleaseNode(OrtNode *input)
    287 1 void ReleaseGraph(OrtGraph *input)
    288 1 void ReleaseModel(OrtModel *input)
    289 22 OrtStatus *GetValueInfoName(const OrtValueInfo *value_info, const char **name)
    290 22 OrtStatus *GetValueInfoTypeInfo(const OrtValueInfo *value_info, const OrtTypeInfo **type_info)
    291 22 const OrtModelEditorApi *GetModelEditorApi(void)
    292 22 OrtStatus *CreateTensorWithDataAndDeleterAsOrtValue(OrtAllocator *deleter, void *p_data, size_t
               p_data_len, const int64_t *shape, size_t shape_len, ONNXTensorElementDataType type, OrtValue **out)
    294 22 const OrtCompileApi *GetCompileApi(void)
    295 22 void CreateKeyValuePairs(OrtKeyValuePairs **out)
    296 22 void AddKeyValuePair(OrtKeyValuePairs *kvps, const char *key, const char *value)
    297 22 const char *GetKeyValue(const OrtKeyValuePairs *kvps, const char *key)
    298 22 void GetKeyValuePairs(const OrtKeyValuePairs *kvps, const char *const **keys, const char *const
               **values, size_t *num_entries)
    299 22 void RemoveKeyValuePair(OrtKeyValuePairs *kvps, const char *key)
    300 1 void ReleaseKeyValuePairs(OrtKeyValuePairs *input)
    301 22 OrtStatus *RegisterExecutionProviderLibrary(OrtEnv *env, const char *registration_name, const char
               *path)
    302 22 OrtStatus *UnregisterExecutionProviderLibrary(OrtEnv *env, const char *registration_name)
    303 22 OrtStatus *GetEpDevices(const OrtEnv *env, const OrtEpDevice *const **ep_devices, size_t
               *num_ep_devices)
    304 22 OrtStatus *SessionOptionsAppendExecutionProvider_V2(OrtSessionOptions *session_options, OrtEnv *env,
               const OrtEpDevice *const *ep_devices, size_t num_ep_devices, const char *const *ep_option_keys, const
               char *const *ep_option_vals, size_t num_ep_options)
    307 22 OrtHardwareDeviceType HardwareDevice_Type(const OrtHardwareDevice *device)
    308 22 uint32_t HardwareDevice_VendorId(const OrtHardwareDevice *device)
    309 22 const char *HardwareDevice_Vendor(const OrtHardwareDevice *device)
    310 22 uint32_t HardwareDevice_DeviceId(const OrtHardwareDevice *device)
    311 22 const OrtKeyValuePairs *HardwareDevice_Metadata(const OrtHardwareDevice *device)
    312 22 const char *EpDevice_EpName(const OrtEpDevice *ep_device)
    313 22 const char *EpDevice_EpVendor(const OrtEpDevice *ep_device)
    314 22 const OrtKeyValuePairs *EpDevice_EpMetadata(const OrtEpDevice *ep_device)
    315 22 const OrtKeyValuePairs *EpDevice_EpOptions(const OrtEpDevice *ep_device)
    316 22 const OrtHardwareDevice *EpDevice_Device(const OrtEpDevice *ep_device)
    317 22 const OrtEpApi *GetEpApi(void)
    318 23 OrtStatus *GetTensorSizeInBytes(const OrtValue *ort_value, size_t *size)
    319 23 OrtStatus *AllocatorGetStats(const OrtAllocator *ort_allocator, OrtKeyValuePairs **out)
    320 23 OrtStatus *CreateMemoryInfo_V2(const char *name, OrtMemoryInfoDeviceType device_type, uint32_t
               vendor_id, int32_t device_id, OrtDeviceMemoryType mem_type, size_t alignment, OrtAllocatorType
               allocator_type, OrtMemoryInfo **out)
    321 23 OrtDeviceMemoryType MemoryInfoGetDeviceMemType(const OrtMemoryInfo *ptr)
    322 23 uint32_t MemoryInfoGetVendorId(const OrtMemoryInfo *ptr)
    323 23 OrtStatus *ValueInfo_GetValueProducer(const OrtValueInfo *value_info, const OrtNode **producer_node,
               size_t *producer_output_index)
    324 23 OrtStatus *ValueInfo_GetValueNumConsumers(const OrtValueInfo *value_info, size_t *num_consumers)
    325 23 OrtStatus *ValueInfo_GetValueConsumers(const OrtValueInfo *value_info, const OrtNode **nodes, int64_t
               *input_indices, size_t num_consumers)
    326 23 OrtStatus *ValueInfo_GetInitializerValue(const OrtValueInfo *value_info, const OrtValue
               **initializer_value)
    327 23 OrtStatus *ValueInfo_GetExternalInitializerInfo(const OrtValueInfo *value_info,
               OrtExternalInitializerInfo **info)
    328 23 OrtStatus *ValueInfo_IsRequiredGraphInput(const OrtValueInfo *value_info, bool
               *is_required_graph_input)
    329 23 OrtStatus *ValueInfo_IsOptionalGraphInput(const OrtValueInfo *value_info, bool
               *is_optional_graph_input)
    330 23 OrtStatus *ValueInfo_IsGraphOutput(const OrtValueInfo *value_info, bool *is_graph_output)
    331 23 OrtStatus *ValueInfo_IsConstantInitializer(const OrtValueInfo *value_info, bool
               *is_constant_initializer)
    332 23 OrtStatus *ValueInfo_IsFromOuterScope(const OrtValueInfo *value_info, bool *is_from_outer_scope)
    333 23 OrtStatus *Graph_GetName(const OrtGraph *graph, const char **graph_name)
    334 23 OrtStatus *Graph_GetModelPath(const OrtGraph *graph, const char **model_path)
    335 23 OrtStatus *Graph_GetOnnxIRVersion(const OrtGraph *graph, int64_t *onnx_ir_version)
    336 23 OrtStatus *Graph_GetNumOperatorSets(const OrtGraph *graph, size_t *num_operator_sets)
    337 23 OrtStatus *Graph_GetOperatorSets(const OrtGraph *graph, const char **domains, int64_t *opset_versions,
               size_t num_operator_sets)
    338 23 OrtStatus *Graph_GetNumInputs(const OrtGraph *graph, size_t *num_inputs)
    339 23 OrtStatus *Graph_GetInputs(const OrtGraph *graph, const OrtValueInfo **inputs, size_t num_inputs)
    340 23 OrtStatus *Graph_GetNumOutputs(const OrtGraph *graph, size_t *num_outputs)
    341 23 OrtStatus *Graph_GetOutputs(const OrtGraph *graph, const OrtValueInfo **outputs, size_t num_outputs)
    342 23 OrtStatus *Graph_GetNumInitializers(const OrtGraph *graph, size_t *num_initializers)
    343 23 OrtStatus *Graph_GetInitializers(const OrtGraph *graph, const OrtValueInfo **initializers, size_t
               num_initializers)
    344 23 OrtStatus *Graph_GetNumNodes(const OrtGraph *graph, size_t *num_nodes)
    345 23 OrtStatus *Graph_GetNodes(const OrtGraph *graph, const OrtNode **nodes, size_t num_nodes)
    346 23 OrtStatus *Graph_GetParentNode(const OrtGraph *graph, const OrtNode **node)
    347 23 OrtStatus *Graph_GetGraphView(const OrtGraph *src_graph, const OrtNode **nodes, size_t num_nodes,
               OrtGraph **dst_graph)
    348 23 OrtStatus *Node_GetId(const OrtNode *node, size_t *node_id)
    349 23 OrtStatus *Node_GetName(const OrtNode *node, const char **node_name)
    350 23 OrtStatus *Node_GetOperatorType(const OrtNode *node, const char **operator_type)
    351 23 OrtStatus *Node_GetDomain(const OrtNode *node, const char **domain_name)
    352 23 OrtStatus *Node_GetSinceVersion(const OrtNode *node, int *since_version)
    353 23 OrtStatus *Node_GetNumInputs(const OrtNode *node, size_t *num_inputs)
    354 23 OrtStatus *Node_GetInputs(const OrtNode *node, const OrtValueInfo **inputs, size_t num_inputs)
    355 23 OrtStatus *Node_GetNumOutputs(const OrtNode *node, size_t *num_outputs)
    356 23 OrtStatus *Node_GetOutputs(const OrtNode *node, const OrtValueInfo **outputs, size_t num_outputs)
    357 23 OrtStatus *Node_GetNumImplicitInputs(const OrtNode *node, size_t *num_implicit_inputs)
    358 23 OrtStatus *Node_GetImplicitInputs(const OrtNode *node, const OrtValueInfo **implicit_inputs, size_t
               num_implicit_inputs)
    359 23 OrtStatus *Node_GetNumAttributes(const OrtNode *node, size_t *num_attributes)
    360 23 OrtStatus *Node_GetAttributes(const OrtNode *node, const OrtOpAttr **attributes, size_t num_attributes)
    361 23 OrtStatus *Node_GetAttributeByName(const OrtNode *node, const char *attribute_name, const OrtOpAttr
               **attribute)
    362 23 OrtStatus *OpAttr_GetTensorAttributeAsOrtValue(const OrtOpAttr *attribute, OrtValue **attr_tensor)
    363 23 OrtStatus *OpAttr_GetType(const OrtOpAttr *attribute, OrtOpAttrType *type)
    364 23 OrtStatus *OpAttr_GetName(const OrtOpAttr *attribute, const char **name)
    365 23 OrtStatus *Node_GetNumSubgraphs(const OrtNode *node, size_t *num_subgraphs)
    366 23 OrtStatus *Node_GetSubgraphs(const OrtNode *node, const OrtGraph **subgraphs, size_t num_subgraphs,
               const char **attribute_names)
    367 23 OrtStatus *Node_GetGraph(const OrtNode *node, const OrtGraph **graph)
    368 23 OrtStatus *Node_GetEpName(const OrtNode *node, const char **out)
    369 1 void ReleaseExternalInitializerInfo(OrtExternalInitializerInfo *input)
    370 23 const char *ExternalInitializerInfo_GetFilePath(const OrtExternalInitializerInfo *info)
    371 23 int64_t ExternalInitializerInfo_GetFileOffset(const OrtExternalInitializerInfo *info)
    372 23 size_t ExternalInitializerInfo_GetByteSize(const OrtExternalInitializerInfo *info)
    373 23 const char *GetRunConfigEntry(const OrtRunOptions *options, const char *config_key)
    374 23 const OrtMemoryInfo *EpDevice_MemoryInfo(const OrtEpDevice *ep_device, OrtDeviceMemoryType memory_type)
    375 23 OrtStatus *CreateSharedAllocator(OrtEnv *env, const OrtEpDevice *ep_device, OrtDeviceMemoryType
               mem_type, OrtAllocatorType allocator_type, const OrtKeyValuePairs *allocator_options, OrtAllocator
               **allocator)
    376 23 OrtStatus *GetSharedAllocator(OrtEnv *env, const OrtMemoryInfo *mem_info, OrtAllocator **allocator)
    377 23 OrtStatus *ReleaseSharedAllocator(OrtEnv *env, const OrtEpDevice *ep_device, OrtDeviceMemoryType
               mem_type)
    378 23 OrtStatus *GetTensorData(const OrtValue *value, const void **out)
    379 23 OrtStatus *GetSessionOptionsConfigEntries(const OrtSessionOptions *options, OrtKeyValuePairs **out)
    380 23 OrtStatus *SessionGetMemoryInfoForInputs(const OrtSession *session, const OrtMemoryInfo
               **inputs_memory_info, size_t num_inputs)
    381 23 OrtStatus *SessionGetMemoryInfoForOutputs(const OrtSession *session, const OrtMemoryInfo
               **outputs_memory_info, size_t num_outputs)
    382 23 OrtStatus *SessionGetEpDeviceForInputs(const OrtSession *session, const OrtEpDevice
               **inputs_ep_devices, size_t num_inputs)
    383 23 OrtStatus *CreateSyncStreamForEpDevice(const OrtEpDevice *ep_device, const OrtKeyValuePairs
               *stream_options, OrtSyncStream **stream)
    384 23 void *SyncStream_GetHandle(OrtSyncStream *stream)
    385 1 void ReleaseSyncStream(OrtSyncStream *input)
    386 23 OrtStatus *CopyTensors(const OrtEnv *env, const OrtValue *const *src_tensors, OrtValue *const
               *dst_tensors, OrtSyncStream *stream, size_t num_tensors)
    387 23 OrtStatus *Graph_GetModelMetadata(const OrtGraph *graph, OrtModelMetadata **out)
    389 23 OrtStatus *CreateExternalInitializerInfo(const char *filepath, int64_t file_offset, size_t byte_size,
               OrtExternalInitializerInfo **out)
    390 24 bool TensorTypeAndShape_HasShape(const OrtTensorTypeAndShapeInfo *info)
    391 24 OrtStatus *KernelInfo_GetConfigEntries(const OrtKernelInfo *info, OrtKeyValuePairs **out)
    392 24 OrtStatus *KernelInfo_GetOperatorDomain(const OrtKernelInfo *info, char *out, size_t *size)
    393 24 OrtStatus *KernelInfo_GetOperatorType(const OrtKernelInfo *info, char *out, size_t *size)
    394 24 OrtStatus *KernelInfo_GetOperatorSinceVersion(const OrtKernelInfo *info, int *since_version)
    395 24 const OrtInteropApi *GetInteropApi(void)
    396 24 OrtStatus *SessionGetEpDeviceForOutputs(const OrtSession *session, const OrtEpDevice
               **outputs_ep_devices, size_t num_outputs)
    406 24 OrtStatus *CreateEnvWithOptions(const OrtEnvCreationOptions *options, OrtEnv **out)
    407 24 OrtStatus *Session_GetEpGraphAssignmentInfo(const OrtSession *session, const OrtEpAssignedSubgraph
               *const **ep_subgraphs, size_t *num_ep_subgraphs)
    408 24 OrtStatus *EpAssignedSubgraph_GetEpName(const OrtEpAssignedSubgraph *ep_subgraph, const char **out)
    409 24 OrtStatus *EpAssignedSubgraph_GetNodes(const OrtEpAssignedSubgraph *ep_subgraph, const
               OrtEpAssignedNode *const **ep_nodes, size_t *num_ep_nodes)
    410 24 OrtStatus *EpAssignedNode_GetName(const OrtEpAssignedNode *ep_node, const char **out)
    411 24 OrtStatus *EpAssignedNode_GetDomain(const OrtEpAssignedNode *ep_node, const char **out)
    412 24 OrtStatus *EpAssignedNode_GetOperatorType(const OrtEpAssignedNode *ep_node, const char **out)
    413 1 void RunOptionsSetSyncStream(OrtRunOptions *options, OrtSyncStream *sync_stream)
    414 24 OrtStatus *GetTensorElementTypeAndShapeDataReference(const OrtValue *value, ONNXTensorElementDataType
               *elem_type, const int64_t **shape_data, size_t *shape_data_count)
    415 25 OrtStatus *RunOptionsEnableProfiling(OrtRunOptions *options, const char *profile_file_prefix)
    417 25 OrtStatus *KernelInfoGetAttributeArray_string(const OrtKernelInfo *info, const char *name, OrtAllocator
               *allocator, char ** *out, size_t *size)
    419 27 OrtStatus *GetMemPatternEnabled(const OrtSessionOptions *options, int *out)
    420 27 OrtStatus *GetSessionExecutionMode(const OrtSessionOptions *options, ExecutionMode *out)
    421 27 OrtStatus *SessionReleaseCapturedGraph(OrtSession *session, int graph_annotation_id)
    422 28 void *GetExperimentalFunction(const char *name)
    423 28 OrtStatus *KernelContext_GetSyncStream(const OrtKernelContext *context, OrtSyncStream **out)
    425 30 OrtStatus *KernelContext_GetPreallocatedOutput(const OrtKernelContext *context, size_t output_index,
               OrtValue **output)
    """,
    "OrtCompileApi": """
    8 22 OrtStatus *CompileModel(const OrtEnv *env, const OrtModelCompilationOptions *model_options)
    """,
    "OrtModelEditorApi": """
    6 22 OrtStatus *CreateNode(const char *operator_name, const char *domain_name, const char *node_name,
            const char *const *input_names, size_t input_names_len, const char *const *output_names,
            size_t output_names_len, OrtOpAttr **attributes, size_t attribs_len, OrtNode **node)
    """,
    "OrtEpApi": """
    0 22 OrtStatus *CreateEpDevice(OrtEpFactory *ep_factory, const OrtHardwareDevice *hardware_device, const
             OrtKeyValuePairs *ep_metadata, const OrtKeyValuePairs *ep_options, OrtEpDevice **ep_device)
    1 1 void ReleaseEpDevice(OrtEpDevice *input)
    2 23 OrtStatus *EpGraphSupportInfo_AddNodesToFuse(OrtEpGraphSupportInfo *graph_support_info, const OrtNode
             *const *nodes, size_t num_nodes, const OrtNodeFusionOptions *node_fusion_options)
    3 23 OrtStatus *EpGraphSupportInfo_AddSingleNode(OrtEpGraphSupportInfo *graph_support_info, const OrtNode
             *node)
    4 23 const char *NodeComputeContext_NodeName(const OrtNodeComputeContext *context)
    5 23 OrtStatus *EpDevice_AddAllocatorInfo(OrtEpDevice *ep_device, const OrtMemoryInfo *allocator_memory_info)
    6 23 const OrtMemoryDevice *MemoryInfo_GetMemoryDevice(const OrtMemoryInfo *memory_info)
    7 23 const OrtMemoryDevice *Value_GetMemoryDevice(const OrtValue *value)
    8 23 bool MemoryDevice_AreEqual(const OrtMemoryDevice *a, const OrtMemoryDevice *b)
    9 23 OrtMemoryInfoDeviceType MemoryDevice_GetDeviceType(const OrtMemoryDevice *memory_device)
    10 23 OrtDeviceMemoryType MemoryDevice_GetMemoryType(const OrtMemoryDevice *memory_device)
    11 23 uint32_t MemoryDevice_GetVendorId(const OrtMemoryDevice *memory_device)
    12 23 uint32_t MemoryDevice_GetDeviceId(const OrtMemoryDevice *memory_device)
    13 23 const OrtSyncStreamImpl *SyncStream_GetImpl(const OrtSyncStream *stream)
    14 23 uint64_t SyncStream_GetSyncId(const OrtSyncStream *stream)
    15 23 uint64_t GetSyncIdForLastWaitOnSyncStream(const OrtSyncStream *producer_stream, const OrtSyncStream
              *consumer_stream)
    16 24 OrtStatus *CreateHardwareDevice(OrtHardwareDeviceType type, uint32_t vendor_id, uint32_t device_id,
              const char *vendor_name, const OrtKeyValuePairs *metadata, OrtHardwareDevice **hardware_device)
    17 1 void ReleaseHardwareDevice(OrtHardwareDevice *input)
    18 24 OrtStatus *CreateKernelRegistry(OrtKernelRegistry **kernel_registry)
    19 1 void ReleaseKernelRegistry(OrtKernelRegistry *input)
    20 24 OrtStatus *KernelRegistry_AddKernel(OrtKernelRegistry *kernel_registry, const OrtKernelDef *kernel_def,
              OrtKernelCreateFunc kernel_create_func, void *kernel_create_func_state)
    21 24 OrtStatus *CreateKernelDefBuilder(OrtKernelDefBuilder **kernel_def_builder_out)
    22 1 void ReleaseKernelDefBuilder(OrtKernelDefBuilder *input)
    23 24 OrtStatus *KernelDefBuilder_SetOperatorType(OrtKernelDefBuilder *kernel_def_builder, const char
              *op_type)
    24 24 OrtStatus *KernelDefBuilder_SetDomain(OrtKernelDefBuilder *kernel_def_builder, const char *domain)
    25 24 OrtStatus *KernelDefBuilder_SetSinceVersion(OrtKernelDefBuilder *kernel_def_builder, int
              since_version_start, int since_version_end)
    26 24 OrtStatus *KernelDefBuilder_SetExecutionProvider(OrtKernelDefBuilder *kernel_def_builder, const char
              *ep_name)
    27 24 OrtStatus *KernelDefBuilder_SetInputMemType(OrtKernelDefBuilder *kernel_def_builder, size_t input_index,
              OrtMemType mem_type)
    28 24 OrtStatus *KernelDefBuilder_SetOutputMemType(OrtKernelDefBuilder *kernel_def_builder, size_t
              output_index, OrtMemType mem_type)
    29 24 OrtStatus *KernelDefBuilder_AddTypeConstraint(OrtKernelDefBuilder *kernel_def_builder, const char
              *arg_name, const OrtDataType *const *types, size_t num_types)
    30 24 OrtStatus *KernelDefBuilder_AddInputOutputAliases(OrtKernelDefBuilder *kernel_def_builder, int const
              *input_indices, int const *output_indices, size_t num_io_indices)
    31 24 OrtStatus *KernelDefBuilder_AddInputOutputMutableAliases(OrtKernelDefBuilder *kernel_def_builder, int
              const *input_indices, int const *output_indices, size_t num_io_indices)
    32 24 OrtStatus *KernelDefBuilder_Build(OrtKernelDefBuilder *kernel_def_builder, OrtKernelDef
              **kernel_def_out)
    33 1 void ReleaseKernelDef(OrtKernelDef *input)
    34 24 const char *KernelDef_GetOperatorType(const OrtKernelDef *kernel_def)
    35 24 const char *KernelDef_GetDomain(const OrtKernelDef *kernel_def)
    36 24 OrtStatus *KernelDef_GetSinceVersion(const OrtKernelDef *kernel_def, int *start_version, int
              *end_version)
    37 24 const char *KernelDef_GetExecutionProvider(const OrtKernelDef *kernel_def)
    38 24 OrtStatus *KernelDef_GetInputMemType(const OrtKernelDef *kernel_def, size_t input_index, OrtMemType
              *mem_type)
    39 24 OrtStatus *KernelDef_GetOutputMemType(const OrtKernelDef *kernel_def, size_t output_index, OrtMemType
              *mem_type)
    40 24 OrtStatus *GetTensorDataType(ONNXTensorElementDataType elem_type, const OrtDataType **out)
    41 24 OrtStatus *EpGraphSupportInfo_LookUpKernel(OrtEpGraphSupportInfo *graph_support_info, const OrtNode
              *node, const OrtKernelDef **out_kernel_def)
    42 24 OrtStatus *SharedPrePackedWeightCache_StoreWeightData(OrtSharedPrePackedWeightCache
              *prepacked_weight_cache, void **buffer_data_ptrs, size_t *buffer_data_sizes, size_t num_buffers)
    43 24 OrtStatus *KernelInfo_GetEp(const OrtKernelInfo *info, const OrtEp **ep)
    44 24 OrtStatus *DeviceEpIncompatibilityDetails_SetDetails(OrtDeviceEpIncompatibilityDetails *details,
              uint32_t reasons_bitmask, int32_t error_code, const char *notes)
    45 24 OrtStatus *CreateIfKernel(const OrtKernelInfo *kernel_info, OrtKernelImpl **kernel_out)
    46 24 OrtStatus *CreateLoopKernel(const OrtKernelInfo *kernel_info, OrtLoopKernelHelper *helper, OrtKernelImpl
              **kernel_out)
    47 24 OrtStatus *CreateScanKernel(const OrtKernelInfo *kernel_info, OrtScanKernelHelper *helper, OrtKernelImpl
              **kernel_out)
    48 24 void ReleaseKernelImpl(OrtKernelImpl *input)
    49 24 OrtStatus *GetEnvConfigEntries(OrtKeyValuePairs **config_entries)
    50 25 OrtStatus *GetOpSchema(const char *name, int max_inclusive_version, const char *domain, OrtOpSchema
              **out_schema)
    51 1 void ReleaseOpSchema(OrtOpSchema *input)
    52 25 OrtStatus *OpSchema_GetSinceVersion(const OrtOpSchema *schema, int *out)
    53 25 OrtStatus *OpSchema_GetNumInputs(const OrtOpSchema *schema, size_t *out)
    54 25 OrtStatus *OpSchema_GetInputName(const OrtOpSchema *schema, size_t index, const char **out)
    55 25 OrtStatus *OpSchema_GetInputTypeConstraint(const OrtOpSchema *schema, size_t index, const
              OrtOpSchemaTypeConstraint **out)
    56 25 OrtStatus *OpSchema_GetNumOutputs(const OrtOpSchema *schema, size_t *out)
    57 25 OrtStatus *OpSchema_GetOutputName(const OrtOpSchema *schema, size_t index, const char **out)
    58 25 OrtStatus *OpSchema_GetOutputTypeConstraint(const OrtOpSchema *schema, size_t index, const
              OrtOpSchemaTypeConstraint **out)
    59 25 OrtStatus *OpSchema_GetTypeConstraintCount(const OrtOpSchema *schema, size_t *out)
    60 25 OrtStatus *OpSchema_GetTypeConstraint(const OrtOpSchema *schema, size_t index, const
              OrtOpSchemaTypeConstraint **out)
    61 25 OrtStatus *OpSchemaTypeConstraint_GetTypeParamName(const OrtOpSchemaTypeConstraint *type_constraint,
              const char **out)
    62 25 OrtStatus *OpSchemaTypeConstraint_GetAllowedTypes(const OrtOpSchemaTypeConstraint *type_constraint,
              const char *const **out_types, size_t *num_types)
    63 25 OrtStatus *OpSchemaTypeConstraint_GetInputIndices(const OrtOpSchemaTypeConstraint *type_constraint,
              const size_t **out_indices, size_t *count)
    64 25 OrtStatus *OpSchemaTypeConstraint_GetOutputIndices(const OrtOpSchemaTypeConstraint *type_constraint,
              const size_t **out_indices, size_t *count)
    65 25 OrtStatus *CreateProfilingEvent(OrtProfilingEventCategory category, int32_t process_id, int32_t
              thread_id, const char *event_name, int64_t timestamp_us, int64_t duration_us, const char *const
              *arg_keys, const char *const *arg_values, size_t num_args, OrtProfilingEvent **out)
    66 1 void ReleaseProfilingEvent(OrtProfilingEvent *input)
    67 25 OrtStatus *ProfilingEvent_GetCategory(const OrtProfilingEvent *event, OrtProfilingEventCategory *out)
    68 25 OrtStatus *ProfilingEvent_GetName(const OrtProfilingEvent *event, const char **out)
    69 25 OrtStatus *ProfilingEvent_GetTimestampUs(const OrtProfilingEvent *event, int64_t *out)
    70 25 OrtStatus *ProfilingEvent_GetDurationUs(const OrtProfilingEvent *event, int64_t *out)
    71 25 OrtStatus *ProfilingEvent_GetArgValue(const OrtProfilingEvent *event, const char *key, const char **out)
    72 25 OrtStatus *ProfilingEventsContainer_AddEvents(OrtProfilingEventsContainer *events_container, const
              OrtProfilingEvent *const *events, size_t num_events)
    73 29 OrtStatus *SessionOptionsGetWeightlessSourceModelBuffer(const OrtSessionOptions *session_options, const
              void **source_model_data, size_t *source_model_data_length)
    74 31 OrtStatus *SessionOptionsGetEpContextConfig(const OrtSessionOptions *session_options,
              OrtEpContextConfig **config)
    75 31 void ReleaseEpContextConfig(OrtEpContextConfig *config)
    76 31 OrtStatus *EpContextConfigGetEpContextDataReadFunc(const OrtEpContextConfig *config, void **read_func,
              void **state)
    77 31 OrtStatus *EpContextConfigGetEpContextDataWriteFunc(const OrtEpContextConfig *config, void **write_func,
              void **state)
    """,
    "OrtInteropApi": """
    0 24 OrtStatus *CreateExternalResourceImporterForDevice(const OrtEpDevice *ep_device, OrtExternalResourceImporter
             **out_importer)
    1 24 void ReleaseExternalResourceImporter(OrtExternalResourceImporter *importer)
    2 24 OrtStatus *CanImportMemory(const OrtExternalResourceImporter *importer, OrtExternalMemoryHandleType
             handle_type, bool *out_supported)
    3 24 OrtStatus *ImportMemory(OrtExternalResourceImporter *importer, const OrtExternalMemoryDescriptor *desc,
             OrtExternalMemoryHandle **out_handle)
    4 24 void ReleaseExternalMemoryHandle(OrtExternalMemoryHandle *handle)
    5 24 OrtStatus *CreateTensorFromMemory(OrtExternalResourceImporter *importer, const OrtExternalMemoryHandle
             *mem_handle, const OrtExternalTensorDescriptor *tensor_desc, OrtValue **out_tensor)
    6 24 OrtStatus *CanImportSemaphore(const OrtExternalResourceImporter *importer, OrtExternalSemaphoreType type,
             bool *out_supported)
    7 24 OrtStatus *ImportSemaphore(OrtExternalResourceImporter *importer, const OrtExternalSemaphoreDescriptor *desc,
             OrtExternalSemaphoreHandle **out_handle)
    8 24 void ReleaseExternalSemaphoreHandle(OrtExternalSemaphoreHandle *handle)
    9 24 OrtStatus *WaitSemaphore(OrtExternalResourceImporter *importer, OrtExternalSemaphoreHandle *semaphore_handle,
             OrtSyncStream *stream, uint64_t value)
    10 24 OrtStatus *SignalSemaphore(OrtExternalResourceImporter *importer, OrtExternalSemaphoreHandle
              *semaphore_handle, OrtSyncStream *stream, uint64_t value)
    11 25 OrtStatus *InitGraphicsInteropForEpDevice(const OrtEpDevice *ep_device, const OrtGraphicsInteropConfig
              *config)
    12 25 OrtStatus *DeinitGraphicsInteropForEpDevice(const OrtEpDevice *ep_device)
    """,
}
