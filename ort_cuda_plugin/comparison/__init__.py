"""Compares results of two execution providers, and finds the first node that differs."""
