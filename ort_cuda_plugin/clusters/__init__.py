"""Claims, clusters, and the lowering of their nodes: the model, the operators and the plans meet here."""
