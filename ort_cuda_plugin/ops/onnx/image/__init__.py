"""Resampling of images of ai.onnx."""
