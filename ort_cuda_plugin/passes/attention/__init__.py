"""Passes that fuse, change and decompose attention."""
