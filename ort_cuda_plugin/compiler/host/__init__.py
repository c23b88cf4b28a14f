"""Compiles Numba's LLVM IR to code for the host CPU, which the emulated device runs."""
