"""Reads ONNX Runtime's graphs, kernels and schemas through its C API."""
