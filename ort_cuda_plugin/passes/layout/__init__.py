"""Passes that choose memory layouts and the order of computation: NHWC, loop order, batch tiles."""
