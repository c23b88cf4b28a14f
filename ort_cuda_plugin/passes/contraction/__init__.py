"""Passes that prepare GEMMs and convolutions: operand prologues, number formats, and the choice of the kernel."""
