"""Kernels of row programs: reductions, softmax, normalisations."""
