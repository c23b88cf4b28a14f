"""Reads ONNX Runtime's graph and ONNX files into the IR; partitions a graph."""
