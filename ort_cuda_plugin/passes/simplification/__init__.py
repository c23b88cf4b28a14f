"""Passes that drop, fold or recompute steps and results, and that write into concatenations directly."""
