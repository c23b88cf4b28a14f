"""Passes that make, change and take apart attention."""
