"""Claims, clusters, and the lowering of their nodes: connects the model, the operators and the plans."""
