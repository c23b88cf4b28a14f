"""Calls of cuBLASLt and cuDNN."""
