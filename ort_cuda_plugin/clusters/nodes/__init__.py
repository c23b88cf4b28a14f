"""The lowering of a graph's nodes, with the bodies of control flow and ranks that ORT does not infer."""
