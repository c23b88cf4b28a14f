"""GEMM kernels: SIMT, tensor cores, GEMV, grouped, and the launch by a step's schedule."""
