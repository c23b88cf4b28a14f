"""Devices: finds and opens them, loads their vendor libraries, and owns the clusters in C."""
