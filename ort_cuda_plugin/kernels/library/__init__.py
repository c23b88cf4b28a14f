"""Calls of cuBLASLt and cuDNN: which steps they can compute, and the arguments of the calls."""
