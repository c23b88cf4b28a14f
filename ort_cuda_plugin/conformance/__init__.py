"""ONNX's own backend tests through stock ONNX Runtime on the plugin, with one verdict for each test."""
