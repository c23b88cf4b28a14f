"""Arithmetic, matrix products, reductions, transforms and random numbers of ai.onnx."""
