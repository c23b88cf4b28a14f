"""Simplification passes: dead code, common subexpressions, constants, rematerialization, concatenations."""
