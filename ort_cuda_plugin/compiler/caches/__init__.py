"""Disk caches that processes share: measured times, library plans, refused calls, quarantine. Only trusted files are
read.
"""
