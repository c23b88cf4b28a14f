"""From a kernel's source to an image: Numba, LLVM, NVIDIA's tools, the caches."""
