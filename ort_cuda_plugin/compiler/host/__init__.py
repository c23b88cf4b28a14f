"""The emulated device's share of the compiler: from Numba's IR to code for the host's CPU."""
