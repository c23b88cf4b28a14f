"""Algorithms in which each thread block solves one problem: a matrix, a path, or the boxes of one class."""
