"""The lowering context, which operators' lowering functions get as an argument, and functions that
record steps in it.
"""
