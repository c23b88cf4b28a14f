"""Code generation: emitters turn steps into kernels; some operators launch kernels directly, without a step."""
