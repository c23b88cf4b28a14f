"""Code generation: turns the program's steps into kernels; some operators launch a kernel directly, without a step."""
