"""Code generation: emitters turn steps into kernels, and some operators launch kernels directly, without a step."""
