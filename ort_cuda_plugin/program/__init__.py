"""What operators write: symbolic sizes, expressions, tensors, steps, and the context that records them."""
