"""Simplification passes: dead code, common subexpressions, constant folding, rematerialization, concatenations."""
