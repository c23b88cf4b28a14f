"""ONNX Runtime's graph and ONNX files read into the IR; the partitioning of a graph."""
