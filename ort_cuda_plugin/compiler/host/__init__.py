"""Compiles Numba's LLVM IR to code for the host's CPU, for the emulated device."""
