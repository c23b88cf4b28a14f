"""Compiled models (EP contexts): file format, storing and loading of clusters."""
