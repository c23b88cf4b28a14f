"""Compiled models (EP contexts): their file format, what a cluster stores in one, and clusters made of that."""
