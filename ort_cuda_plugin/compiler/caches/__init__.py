"""Disk caches that processes share: files of trusted owners, eviction by size, measured times, cuDNN's plans."""
