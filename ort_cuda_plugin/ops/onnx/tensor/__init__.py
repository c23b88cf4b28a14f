"""Operators of ai.onnx that move elements: views, slices, gathers, scatters, selections, sequences."""
