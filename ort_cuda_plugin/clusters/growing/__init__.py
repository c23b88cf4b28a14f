"""Tensors that grow in each iteration of a search, in buffers of fixed capacity."""
