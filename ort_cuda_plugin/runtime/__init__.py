"""Compile pipeline, caches, plan format, and the Python face of the driver table."""
