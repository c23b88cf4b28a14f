"""Attention: multi-pass, flash, split-KV, linear, and caches of keys and values."""
