"""Symbolic integers for sizes, and the scalar expressions that steps compute for each element."""
