"""The lowering context, which operators' lowering functions receive, and functions that record steps."""
