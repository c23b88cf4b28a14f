"""Schedules: which engine, tile and split of k a step gets, decided once, as data."""
