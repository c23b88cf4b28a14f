// Kernels of CUDA C++ for the emulated device; tests/harness/foreign_kernels.py says what each computes.
extern "C" __global__ void reverse_in_shared(const float* x, float* y, int n) {
  extern __shared__ float tile[];
  int base = blockIdx.x * blockDim.x, i = base + threadIdx.x;
  tile[threadIdx.x] = i < n ? x[i] : 0.f;
  __syncthreads();
  if (i < n) y[i] = tile[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void histogram(const unsigned char* x, unsigned* bins, int n) {
  __shared__ unsigned own[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) own[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&own[x[i]], 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], own[i]);
}
__device__ float warp_sum(float v) {
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}
extern "C" __global__ void sum_rows(const float* x, float* y, int columns) {
  __shared__ float parts[32];
  float total = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) total += x[blockIdx.x * columns + i];
  total = warp_sum(total);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x < 32) {
    total = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.f;
    total = warp_sum(total);
    if (threadIdx.x == 0) y[blockIdx.x] = total;
  }
}
extern "C" __global__ void compact(const int* x, int* y, unsigned* count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  bool keep = i < n && x[i] > 0;
  unsigned mask = __ballot_sync(0xffffffffu, keep), lane = threadIdx.x % 32, base = 0;
  if (lane == 0 && mask) base = atomicAdd(count, __popc(mask));
  base = __shfl_sync(0xffffffffu, base, 0);
  if (keep) y[base + __popc(mask & ((1u << lane) - 1))] = x[i];
}
struct Params { const float* x; float* y; float alpha; int n; double beta; int pad[3]; };
extern "C" __global__ void by_struct(Params p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.y[i] = p.alpha * p.x[i] + (float)p.beta + p.pad[2];
}
extern "C" __global__ void count_and_limits(const int* x, int* out, int n) {
  int i = threadIdx.x;
  int v = i < n ? x[i] : 0;
  int more = __syncthreads_count(v > 0);
  int any = __syncthreads_or(v == 77), all = __syncthreads_and(v > -1000);
  int s = __reduce_add_sync(0xffffffffu, v), lo = __reduce_min_sync(0xffffffffu, v);
  unsigned same = __match_any_sync(0xffffffffu, v & 3);
  if (i == 0) { out[0] = more; out[1] = any; out[2] = all; }
  if (i % 32 == 0) { atomicAdd(out + 3, s); atomicMin(out + 4, lo); }
  out[8 + i] = (int)same;
}
extern "C" __global__ void chain(unsigned* flags, const float* x, float* y, int n) {
  // Decoupled look-back: each block waits for the flag of the one before it.
  __shared__ float before;
  float v = x[blockIdx.x * blockDim.x + threadIdx.x];
  float total = warp_sum(v);
  if (threadIdx.x == 0) {
    if (blockIdx.x > 0) {
      volatile unsigned* flag = flags + blockIdx.x - 1;
      while (*flag == 0) __nanosleep(20);
      __threadfence();
      before = ((volatile float*)y)[blockIdx.x - 1];
    } else before = 0;
    ((volatile float*)y)[blockIdx.x] = before + total;
    __threadfence();
    atomicExch(flags + blockIdx.x, 1u);
  }
}
typedef unsigned long long u64;
extern "C" __global__ void integers(const u64* x, const int* d, u64* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64 v = x[i];
  unsigned lo = (unsigned)v, hi = (unsigned)(v >> 32);
  u64 r = __umul64hi(v, 0x9E3779B97F4A7C15ull);
  r ^= (u64)__brev(lo) << 7;
  r += __byte_perm(lo, hi, 0x2503) + __clz(hi) + __ffs(lo) + __popcll(v) + __dp4a((int)lo, (int)hi, 5);
  r ^= __funnelshift_l(lo, hi, 11) + (v % (u64)(d[i])) + (u64)((long long)v / d[i]);
  r += __vadd4(lo, hi) ^ __vabsdiffu4(lo, hi) ^ __vmaxs2(lo, hi);
  y[i] = r;
}
