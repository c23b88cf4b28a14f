/* The members of the emulator's driver table, by file. */
#ifndef OCP_EMULATOR_DRIVER_H
#define OCP_EMULATOR_DRIVER_H

#include "driver/driver.h"

/* state.c */
CUresult emu_ctx_set_current(CUcontext context);
CUresult emu_ctx_get_current(CUcontext *context);
const char *emu_last_error(void);

/* memory.c */
CUresult emu_mem_get_info(size_t *free_bytes, size_t *total_bytes);
CUresult emu_mem_alloc(CUdeviceptr *address, size_t bytes);
CUresult emu_mem_free(CUdeviceptr address);
CUresult emu_mem_host_alloc(void **address, size_t bytes, unsigned flags);
CUresult emu_mem_free_host(void *address);
CUresult emu_memcpy_h2d(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream);
CUresult emu_memcpy_d2h(void *dst, CUdeviceptr src, size_t bytes, CUstream stream);
CUresult emu_memcpy_d2d(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream);
CUresult emu_memset_d8(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream);
bool emu_reuse(CUdeviceptr address, size_t bytes, size_t held, CUstream stream);
size_t emu_redzone(void);

/* mempool.c */
CUresult emu_mem_pool_create(CUmemoryPool *pool, const CUmemPoolProps *props);
CUresult emu_mem_pool_destroy(CUmemoryPool pool);
CUresult emu_mem_pool_set_attribute(CUmemoryPool pool, int attribute, void *value);
CUresult emu_mem_pool_get_attribute(CUmemoryPool pool, int attribute, void *value);
CUresult emu_mem_pool_trim_to(CUmemoryPool pool, size_t keep);
CUresult emu_mem_alloc_from_pool_async(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream);
CUresult emu_mem_free_async(CUdeviceptr address, CUstream stream);

/* stream.c */
CUresult emu_ctx_synchronize(void);
CUresult emu_pointer_get_attribute(void *data, int attribute, CUdeviceptr pointer);
CUresult emu_stream_create(CUstream *stream, unsigned flags);
CUresult emu_stream_destroy(CUstream stream);
CUresult emu_stream_synchronize(CUstream stream);
CUresult emu_stream_query(CUstream stream);
CUresult emu_stream_get_ctx(CUstream stream, CUcontext *context);

/* event.c */
CUresult emu_stream_wait_event(CUstream stream, CUevent event, unsigned flags);
CUresult emu_event_create(CUevent *event, unsigned flags);
CUresult emu_event_destroy(CUevent event);
CUresult emu_event_record(CUevent event, CUstream stream);
CUresult emu_event_synchronize(CUevent event);
CUresult emu_event_query(CUevent event);
CUresult emu_event_elapsed_time(float *milliseconds, CUevent start, CUevent end);

/* loader.c */
CUresult emu_module_load(CUmodule *module, const void *image, size_t image_bytes);
CUresult emu_module_unload(CUmodule module);
CUresult emu_module_get_function(CUfunction *function, CUmodule module, const char *name);

/* launch.c */
CUresult emu_func_set_attribute(CUfunction function, int attribute, int value);
CUresult emu_launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                           void **extra);

/* capture.c */
CUresult emu_stream_begin_capture(CUstream stream, int mode);
CUresult emu_stream_end_capture(CUstream stream, CUgraph *graph);
CUresult emu_stream_is_capturing(CUstream stream, int *status);

/* graph.c */
CUresult emu_graph_create(CUgraph *graph, unsigned flags);
CUresult emu_graph_add_kernel_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_KERNEL_NODE_PARAMS *params);
CUresult emu_graph_add_memcpy_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_MEMCPY3D *params, CUcontext context);
CUresult emu_graph_add_memset_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                   const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context);
CUresult emu_graph_add_child_graph_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                                        CUgraph child);
CUresult emu_graph_get_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult emu_graph_node_get_type(CUgraphNode node, int *type);
CUresult emu_graph_destroy(CUgraph graph);

/* graph_exec.c */
CUresult emu_graph_instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult emu_graph_exec_kernel_node_set_params(CUgraphExec exec, CUgraphNode node,
                                               const CUDA_KERNEL_NODE_PARAMS *params);
CUresult emu_graph_exec_memcpy_node_set_params(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *params,
                                               CUcontext context);
CUresult emu_graph_exec_memset_node_set_params(CUgraphExec exec, CUgraphNode node,
                                               const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context);
CUresult emu_graph_exec_child_graph_node_set_params(CUgraphExec exec, CUgraphNode node, CUgraph child);
CUresult emu_graph_launch(CUgraphExec exec, CUstream stream);
CUresult emu_graph_exec_destroy(CUgraphExec exec);

#endif
