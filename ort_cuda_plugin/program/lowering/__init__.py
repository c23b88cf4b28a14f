"""The lowering context, which operators' functions receive, and the functions that record steps in it."""
