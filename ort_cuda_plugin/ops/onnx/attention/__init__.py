"""Attention of ai.onnx, and the lowering that all attention operators share."""
