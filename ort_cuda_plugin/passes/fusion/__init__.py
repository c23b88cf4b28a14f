"""Vertical and horizontal fusion: passes that join steps into one."""
