"""Attention of com.microsoft to selected keys, and the indexers that select them."""
