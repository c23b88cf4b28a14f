"""Profiles of Runs, from ONNX Runtime's profile and the plans: by node, step and kernel, on the device and the host."""
