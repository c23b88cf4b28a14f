"""Operators of com.microsoft, by subject."""
