"""Checks the kernels, library calls and driver features of a device, and quarantines what fails."""
