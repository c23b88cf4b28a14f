"""Algorithms that solve one problem per thread block."""
