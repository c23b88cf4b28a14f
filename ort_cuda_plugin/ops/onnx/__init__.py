"""Operators of ai.onnx, by subject."""
