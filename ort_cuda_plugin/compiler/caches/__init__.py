"""Disk caches that processes share: measured times, library plans, refused calls, quarantine; only trusted files."""
