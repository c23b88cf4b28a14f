"""Kernels of maps: elementwise expressions, transposes, gathers by index maps."""
