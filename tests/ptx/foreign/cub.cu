// Kernels with block primitives of CUB; tests/harness/foreign_kernels.py says what each computes.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_store.cuh>
extern "C" __global__ void cub_sum(const float* x, float* y, int n) {
  using Reduce = cub::BlockReduce<float, 128>;
  __shared__ typename Reduce::TempStorage temp;
  float v = 0;
  for (int i = threadIdx.x; i < n; i += 128) v += x[blockIdx.x * n + i];
  float total = Reduce(temp).Sum(v);
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}
extern "C" __global__ void cub_scan(const int* x, int* y) {
  using Load = cub::BlockLoad<int, 128, 4, cub::BLOCK_LOAD_TRANSPOSE>;
  using Store = cub::BlockStore<int, 128, 4, cub::BLOCK_STORE_TRANSPOSE>;
  using Scan = cub::BlockScan<int, 128>;
  __shared__ union { typename Load::TempStorage load; typename Store::TempStorage store; typename Scan::TempStorage scan; } temp;
  int items[4];
  Load(temp.load).Load(x + blockIdx.x * 512, items);
  __syncthreads();
  Scan(temp.scan).InclusiveSum(items, items);
  __syncthreads();
  Store(temp.store).Store(y + blockIdx.x * 512, items);
}
extern "C" __global__ void cub_sort(const unsigned* x, unsigned* y) {
  using Sort = cub::BlockRadixSort<unsigned, 64, 4>;
  __shared__ typename Sort::TempStorage temp;
  unsigned items[4];
  for (int i = 0; i < 4; i++) items[i] = x[blockIdx.x * 256 + threadIdx.x * 4 + i];
  Sort(temp).Sort(items);
  for (int i = 0; i < 4; i++) y[blockIdx.x * 256 + threadIdx.x * 4 + i] = items[i];
}
