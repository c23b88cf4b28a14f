"""Copies between host and device in a Run, and their time."""
