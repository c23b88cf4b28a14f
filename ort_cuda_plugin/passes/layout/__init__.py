"""Passes that choose the order of dimensions in memory and of work: channels-last, loops, batches."""
