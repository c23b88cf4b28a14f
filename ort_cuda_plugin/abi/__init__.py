"""Declarations of ONNX Runtime's C ABI, and Python's bindings of the C library and of the driver table."""
