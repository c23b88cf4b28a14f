"""The lowering context, which lowering functions of operators receive, and functions that record steps in it."""
