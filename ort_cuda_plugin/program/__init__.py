"""The program IR: symbolic sizes, expressions, tensors, steps, and the context that operators record them in."""
