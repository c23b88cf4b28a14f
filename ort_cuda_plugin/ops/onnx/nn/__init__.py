"""Layers of networks of ai.onnx: convolutions, pooling, normalizations, recurrences, quantization, losses."""
