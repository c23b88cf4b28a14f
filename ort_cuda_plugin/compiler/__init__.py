"""Compiles kernel sources to images (cubins, or objects for the host CPU), and caches the images."""
