"""Emission: the pass that turns steps into kernel launches."""
