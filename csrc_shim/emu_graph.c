/* Stream capture and graphs of the emulated device. */
#include "emu_stream.h"

bool emu_is_capturing(CUstream stream, CUresult *result) {
  (void)stream;
  *result = CUDA_SUCCESS;
  return false;
}
CUresult emu_capture_op(CUstream stream, const emu_op *op) {
  (void)stream, (void)op;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_capture_record(CUstream stream, CUevent event) {
  (void)stream, (void)event;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_capture_wait(CUstream stream, CUevent event) {
  (void)stream, (void)event;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
void emu_capture_forget(CUevent event) { (void)event; }
void emu_capture_leave(CUstream stream) { (void)stream; }
CUresult emu_capture_forbids(CUstream stream) {
  (void)stream;
  return CUDA_SUCCESS;
}
void emu_capture_invalidate(CUevent event) { (void)event; }
bool emu_replay_step(emu_replay *replay, emu_device *device, const emu_clock *clock, uint32_t (*random)(uint32_t)) {
  (void)replay, (void)device, (void)clock, (void)random;
  return false;
}
void emu_replay_free(emu_replay *replay) { (void)replay; }
CUresult emu_stream_begin_capture(CUstream stream, int mode) {
  (void)stream, (void)mode;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_stream_end_capture(CUstream stream, CUgraph *graph) {
  (void)stream, (void)graph;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_stream_is_capturing(CUstream stream, int *status) {
  (void)stream;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult emu_graph_get_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  (void)graph, (void)nodes, (void)count;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_graph_node_get_type(CUgraphNode node, int *type) {
  (void)node, (void)type;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_graph_instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  (void)exec, (void)graph, (void)flags;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_graph_exec_kernel_node_set_params(CUgraphExec exec, CUgraphNode node,
                                               const CUDA_KERNEL_NODE_PARAMS *params) {
  (void)exec, (void)node, (void)params;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_graph_launch(CUgraphExec exec, CUstream stream) {
  (void)exec, (void)stream;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_graph_exec_destroy(CUgraphExec exec) {
  (void)exec;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult emu_graph_destroy(CUgraph graph) {
  (void)graph;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
