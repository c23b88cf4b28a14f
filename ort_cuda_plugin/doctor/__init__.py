"""Examines an installation: reports what is wrong with it, and what to do."""
