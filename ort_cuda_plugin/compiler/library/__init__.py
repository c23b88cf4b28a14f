"""The kernel library: returns compiled kernels, and compiles missing ones, also in helper processes."""
