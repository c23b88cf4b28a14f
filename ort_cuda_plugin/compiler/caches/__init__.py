"""Folders of files that processes share: trusted files, the bound of a cache, times, cuDNN's plans."""
