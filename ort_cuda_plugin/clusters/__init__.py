"""Where the model, operators and plans meet: claims, clusters, the lowering of a graph's nodes."""
