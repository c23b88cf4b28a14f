"""Measures sessions of several providers beside each other: Runs that alternate in one process, and creation."""
