"""The program IR: symbolic sizes, scalar expressions, tensors, steps, and the context that records steps."""
