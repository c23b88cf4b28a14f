"""Analyses that passes use: def-use chains, views, equal expressions, bounds of values. They change no program."""
