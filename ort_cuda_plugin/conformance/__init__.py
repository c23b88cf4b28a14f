"""Runs ONNX's backend tests through stock ONNX Runtime on the plugin, and gives each test a verdict."""
