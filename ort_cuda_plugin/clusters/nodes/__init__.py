"""The lowering of a graph's nodes, with the bodies of control flow and ranks that nobody infers."""
