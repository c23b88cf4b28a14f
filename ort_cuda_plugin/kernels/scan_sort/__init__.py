"""Scans, sorting and selection."""
