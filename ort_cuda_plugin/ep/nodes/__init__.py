"""Nodes that run: fused nodes, single nodes, repetitions, custom operators, and the kernel registry."""
