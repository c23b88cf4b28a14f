"""GEMM kernels: SIMT GEMM, tensor-core GEMM, GEMV, grouped GEMM, and their launch by a step's schedule."""
