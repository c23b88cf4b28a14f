"""Passes that form attention steps from GEMM, softmax, GEMM, simplify them, and decompose them if that is faster."""
