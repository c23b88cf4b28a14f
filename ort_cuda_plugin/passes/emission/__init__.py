"""The pass that makes kernels of steps."""
