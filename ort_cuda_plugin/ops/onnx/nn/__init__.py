"""Neural-network operators of ai.onnx: convolution, pooling, normalization, recurrence, quantization, loss."""
