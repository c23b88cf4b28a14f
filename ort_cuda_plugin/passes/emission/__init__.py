"""Emission: the pass that generates kernels for steps, and replaces the steps by launches."""
