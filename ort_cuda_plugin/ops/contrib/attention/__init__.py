"""Attention of com.microsoft: dense, cached, packed and paged."""
