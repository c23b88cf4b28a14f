"""Numba CUDA kernels and the generators that make kernels from expressions."""
