"""Operators of applications: their records, their registry, and the forms in which authors write them."""
