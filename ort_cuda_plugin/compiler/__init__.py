"""Compiles kernel sources to images (cubins, or objects for the host CPU) with Numba, LLVM and NVIDIA's tools; caches
them.
"""
