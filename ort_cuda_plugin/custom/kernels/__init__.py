"""Kernels of applications: their source, their arguments, and what is wrong with them."""
