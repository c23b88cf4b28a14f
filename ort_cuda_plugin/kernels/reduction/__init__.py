"""Kernels of row programs: reductions, and results computed from them, such as softmax and normalizations."""
