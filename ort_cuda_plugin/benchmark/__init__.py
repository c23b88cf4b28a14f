"""Measures sessions of several providers: alternating Runs in one process, and session creation."""
