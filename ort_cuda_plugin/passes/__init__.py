"""From steps to steps: what fusion does between lowering and the making of kernels."""
