"""Symbolic sizes and scalar expressions: what steps compute, and for which sizes."""
