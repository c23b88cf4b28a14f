"""Passes that prepare GEMMs and convolutions: operands, number format, and the choice of the kernel."""
