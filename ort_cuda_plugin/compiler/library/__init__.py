"""The kernel library: returns compiled kernels from memory or the disk cache, and compiles missing ones, if need be in
helper processes.
"""
