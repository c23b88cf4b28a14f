"""An ONNX Runtime plugin execution provider: Numba CUDA kernels run by a plain C library."""
