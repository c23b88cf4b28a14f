"""Compiles a kernel's source to an image (cubin or host object), with Numba, LLVM and NVIDIA's tools, and caches it."""
