"""Runs ONNX's backend tests through stock ONNX Runtime on the plugin, and gives a verdict for each test."""
