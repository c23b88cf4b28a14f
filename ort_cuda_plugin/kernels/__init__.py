"""Emitters, which make kernels of steps, and the mechanisms of operators that launch kernels of their own at once."""
