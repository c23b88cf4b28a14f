"""Kernels for scans, sorting and top-k selection."""
