"""What may be wrong with an installation, and what to do about it."""
