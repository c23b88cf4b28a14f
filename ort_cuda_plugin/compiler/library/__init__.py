"""The kernel library: returns compiled kernels from memory or the disk cache, and compiles the missing ones."""
