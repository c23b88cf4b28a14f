"""Fusion passes: vertical (producer and consumer) and horizontal (independent steps that share an input or a shape)."""
