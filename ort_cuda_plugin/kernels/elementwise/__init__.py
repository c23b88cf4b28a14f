"""Elementwise kernels: expressions, transposes, and gathers and scatters by index maps."""
