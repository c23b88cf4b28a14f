// Kernels with types and groups of CUDA's headers; tests/harness/foreign_kernels.py says what each computes.
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda/pipeline>
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
namespace cg = cooperative_groups;
extern "C" __global__ void halves(const __half2* x, const __nv_bfloat162* b, __half2* y, __nv_bfloat162* c, __half* total, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  __half2 v = __hfma2(x[i], x[i], __float2half2_rn(0.5f));
  y[i] = __hmax2(v, h2exp(__hneg2(x[i])));
  c[i] = __hadd2(b[i], __hmul2(b[i], b[i]));
  atomicAdd(total, __low2half(v));
}
extern "C" __global__ void quantize(const float2* x, __nv_fp8x2_e4m3* y, float2* back, __nv_fp8x2_e5m2* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __nv_fp8x2_e4m3(x[i]);
  z[i] = __nv_fp8x2_e5m2(x[i]);
  back[i] = (float2)y[i];
}
extern "C" __global__ void special(const double* x, double* y, float* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = sin(x[i]) + exp(x[i] * 0.1) * log(1 + fabs(x[i])) + pow(fabs(x[i]), 0.7);
  z[i] = erff((float)x[i]) + tanhf((float)x[i]) + __fsqrt_rd(fabsf((float)x[i])) + __frcp_rz(1.f + (float)(x[i] * x[i]));
}
extern "C" __global__ void groups(const float* x, float* y, int n) {
  __shared__ alignas(16) float tile[256];
  auto block = cg::this_thread_block();
  auto warp = cg::tiled_partition<8>(block);
  cg::memcpy_async(block, tile, x + blockIdx.x * 256, sizeof(tile));
  cg::wait(block);
  float v = tile[block.thread_rank()];
  for (int d = warp.size() / 2; d; d /= 2) v += warp.shfl_down(v, d);
  if (warp.thread_rank() == 0) y[blockIdx.x * 32 + block.thread_rank() / 8] = v;
  block.sync();
}
