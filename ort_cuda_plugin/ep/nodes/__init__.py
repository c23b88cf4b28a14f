"""Nodes that run: fused nodes, single nodes, searches, custom operators, and the kernel registry."""
