"""From a graph to plans: claims of nodes, clusters, and the lowering of a cluster's nodes."""
