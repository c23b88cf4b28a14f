"""Analyses that passes use: def-use chains, strided views, equal expressions, value ranges. None
modifies the program.
"""
