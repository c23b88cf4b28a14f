"""The checks of the selftest, by subject."""
