"""Analyses that passes use, without changing the program: def-use chains, strided views, value ranges."""
