"""Compiled models (EP contexts): their file format, how clusters are stored in it, and how they are loaded."""
