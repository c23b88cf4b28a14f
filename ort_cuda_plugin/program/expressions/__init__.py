"""Symbolic sizes, and the scalar expressions that steps compute."""
