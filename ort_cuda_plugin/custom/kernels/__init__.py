"""Kernels of applications: their source, their arguments, and checks of both."""
